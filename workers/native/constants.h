/* Written from the constants in Python by `python -m tools.native_header --write`. */

/* workers.protocol */
#define OP_BITS 4
#define FLAG_BITS 4
#define TARGET_BITS 24
#define RING 0
#define OP_STEP 1
#define OP_STEP_RESET 2
#define OP_RESET 3
#define FLAG_EACH 1
#define FLAG_PREPARED 2
#define STATUS_OK 0
#define LEAVE 4611686018427387904LL

/* shm.slab */
#define ALIGNMENT 128

/* workers.seeding */
#define SEED_POOL 0x4u
#define SEED_SHIFT 0x10u
#define SEED_MULT_A 0x931E8875u
#define SEED_INIT_B 0x8B51F9DDu
#define SEED_MULT_B 0x58F38DEDu
#define SEED_MIX_L 0xCA01F9DDu
#define SEED_MIX_R 0x4973F715u

/* workers.info_rows */
#define TEXT_BYTES 120
#define IS_DICT 0
#define IS_LIST 1
#define IS_TUPLE 2
#define IS_NONE 3
#define IS_BOOL 4
#define IS_INT 5
#define IS_FLOAT 6
#define IS_TEXT 7
#define IS_SCALAR 8
#define IS_ARRAY 9
#define NUM_KINDS 10

/* executor.batches.actions */
#define CHECK_ANY 0
#define CHECK_INDEX 1
#define CHECK_FINITE 2
