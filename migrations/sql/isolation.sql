-- Whatever the role's default is. It holds for this transaction alone, and unlike SET
-- TRANSACTION it is no warning that there was no BEGIN.
SET transaction_isolation = 'read committed'
