-- Tells the names of advisory locks that are held.
-- $1 names, $2 their namespaces (NULL: none)
SELECT /* schema */pgxlock_publish_names($1::text[], $2::text[])
