DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = 'serialization_failure'; END $$
