-- Whether a program would trust what this role installs in the schema $1, and which role that is. The
-- search_path is the role's, so that all is qualified.
SELECT r.rolsuper OR d.datdba OPERATOR(pg_catalog.=) r.oid OR coalesce(n.nspowner OPERATOR(pg_catalog.=) r.oid, true), r.rolname::pg_catalog.text
  FROM pg_catalog.pg_roles r
  JOIN pg_catalog.pg_database d ON d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
  LEFT JOIN pg_catalog.pg_namespace n ON n.nspname OPERATOR(pg_catalog.=) $1::pg_catalog.text
 WHERE r.rolname OPERATOR(pg_catalog.=) current_user
