-- monitor_leases.sql for a schema of version 5 or older, where no lease can be shared.
SELECT l.lock_name::text AS name,
       false AS shared,
       l.holder_id::text AS holder,
       l.fencing_token AS token,
       coalesce(CASE WHEN l.metadata = '{}' THEN '' WHEN jsonb_typeof(l.metadata) = 'string' THEN l.metadata #>> '{}' ELSE l.metadata::text END, '') AS metadata,
       l.state,
       CASE WHEN isfinite(l.acquired_at) THEN l.acquired_at END AS since,
       CASE WHEN isfinite(l.expires_at) THEN l.expires_at END AS expires,
       l.acquired_at > clock_timestamp() AS suspect
  FROM /* schema */lock_leases l,
       (SELECT coalesce(current_setting('pgxlock.key', true), '') AS key, coalesce(current_setting('pgxlock.prefix', true), '') AS prefix,
               string_to_array(nullif(current_setting('pgxlock.states', true), ''), ',') AS states OFFSET 0) f
 WHERE (f.key = '' OR l.lock_name::text = f.key COLLATE "C")
   AND (f.prefix = '' OR starts_with(l.lock_name::text, f.prefix))
   AND (f.states IS NULL OR l.state = ANY (f.states))
