-- The schema to migrate, and the database as golang-migrate's command calls it
-- in the key of its lock: by the path of a URL.
SELECT current_schema()::text, '/' || current_database()::text
