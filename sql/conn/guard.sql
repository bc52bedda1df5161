-- Fails, by a division by zero, in another backend than $1: what follows in the same
-- batch is then not done.
SELECT 1 OPERATOR(pg_catalog./) (pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) $1::pg_catalog.int4)::pg_catalog.int4
