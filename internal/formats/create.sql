-- Not CREATE ... IF NOT EXISTS: that asks for the right to create schemas even
-- where there is nothing to create.
DO $pgxlock$
BEGIN
  IF pg_catalog.to_regnamespace(/* literal */) IS NULL THEN
    CREATE SCHEMA /* schema */;
  END IF;
EXCEPTION WHEN duplicate_schema OR unique_violation THEN
  NULL;                                     -- somebody else was faster
END $pgxlock$;
