-- Functions of ours that would look for their objects elsewhere than in their own
-- schema. Those whose body was parsed when they were made do not look.
-- $1 schema
SELECT p.oid::regprocedure::text
  FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
 WHERE n.nspname = $1::text AND p.prokind = 'f' AND p.prosqlbody IS NULL
   AND (starts_with(p.proname, 'pgxlock_') AND NOT starts_with(p.proname, 'pgxlock_adopted_')         -- kept, not called
        OR EXISTS (SELECT FROM pg_proc r WHERE r.pronamespace = n.oid AND r.proname = 'pgxlock_rights'
                      AND position('"' || p.proname || '(' IN r.prosrc) > 0))
   AND NOT EXISTS (SELECT FROM unnest(p.proconfig) setting
                    WHERE replace(setting, '"', '') = 'search_path=' || replace(n.nspname, '"', '') || ', pg_temp')
 ORDER BY 1
