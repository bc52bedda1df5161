-- Asks all who have a lock to step down; whom it asked. All is qualified: in the command
-- search_path is the role's.
-- $1 kind, $2 name, $3 who asks, $4 why
SELECT /* schema */pgxlock_ask_to_step_down($1::pg_catalog.int4, $2::pg_catalog.text, $3::pg_catalog.text, $4::pg_catalog.text)
