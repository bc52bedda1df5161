-- What this session's settings come to before anything of ours is set, and where
-- each is made. search_path is still the role's, so that all is qualified.
-- $1 names
SELECT s.name, s.setting, s.source
  FROM pg_catalog.pg_settings s WHERE s.name OPERATOR(pg_catalog.=) ANY ($1::pg_catalog.text[])
