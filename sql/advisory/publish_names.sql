-- Tells the names of advisory locks that are held.
-- $1 names
SELECT /* schema */pgxlock_publish_names($1::text[])
