-- Whether a program would trust what this role installs in the schema $1, and which role that is.
SELECT r.rolsuper OR d.datdba = r.oid OR coalesce(n.nspowner = r.oid, true), r.rolname::text
  FROM pg_catalog.pg_roles r
  JOIN pg_catalog.pg_database d ON d.datname = current_database()
  LEFT JOIN pg_catalog.pg_namespace n ON n.nspname = $1::text
 WHERE r.rolname = current_user
