-- Makes what follows in the same batch a READ COMMITTED transaction, whatever the role's
-- default is. It holds for that transaction alone, and unlike SET TRANSACTION it is no
-- warning that there was no BEGIN.
SET transaction_isolation = 'read committed'
