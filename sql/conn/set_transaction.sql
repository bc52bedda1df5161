-- Makes what follows in the same batch a transaction as ours are, for a role whose
-- defaults are others. The server logs a warning that there was no BEGIN.
SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE, NOT DEFERRABLE
