-- Makes what follows in the same batch a transaction as the monitor's are, for a role whose
-- defaults are others. It holds for that one; unlike SET TRANSACTION it is no warning that
-- there was no BEGIN.
SET transaction_isolation = 'read committed'
