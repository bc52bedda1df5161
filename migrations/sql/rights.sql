-- Returns for a schema: this role; the other one that owns pgxlock there, NULL if there is none; whether this
-- role may create objects in the schema, NULL if there is no schema; whether it may create schemas; and the
-- schema and the database. Names are quoted for a statement.
-- $1 schema
SELECT quote_ident(current_user::text),
       (SELECT quote_ident(min(o.rolname::text))
          FROM pg_proc p
          JOIN pg_namespace n ON n.oid = p.pronamespace
          JOIN pg_roles o ON o.oid = p.proowner
         WHERE n.nspname = $1::text
           AND p.proname IN ('pgxlock_version', 'repair_lock_tokens')
           AND p.pronargs = 0
           AND o.rolname <> current_user),
       (SELECT has_schema_privilege(n.oid, 'CREATE') FROM pg_namespace n WHERE n.nspname = $1::text),
       has_database_privilege(current_database()::text, 'CREATE'),
       quote_ident($1::text),
       quote_ident(current_database()::text)
