-- The leases and permits, of those that are shared each of who share them. All of them,
-- or, after SET pgxlock.key = 'order:42', those of one name; after SET pgxlock.prefix =
-- 'order:', those whose name begins so; after SET pgxlock.states = 'live', or
-- 'expired,abandoned', those in these states.
-- suspect: it began later than now, so that the server's clock was set back, and the
-- lease lasts longer than it should.
SELECT l.lock_name::text AS name,
       l.shared,
       l.holder_id::text AS holder,
       l.fencing_token AS token,
       coalesce(CASE WHEN l.metadata = '{}' THEN '' WHEN jsonb_typeof(l.metadata) = 'string' THEN l.metadata #>> '{}' ELSE l.metadata::text END, '') AS metadata,
       l.state,
       CASE WHEN isfinite(l.acquired_at) THEN l.acquired_at END AS since,
       CASE WHEN isfinite(l.expires_at) THEN l.expires_at END AS expires,
       l.acquired_at > clock_timestamp() AS suspect
  FROM (SELECT false AS shared, a.* FROM /* schema */lock_leases a WHERE a.holder_id::text <> '*shared' COLLATE "C"
        UNION ALL
        SELECT true, s.* FROM /* schema */lock_shares s) l,
       (SELECT coalesce(current_setting('pgxlock.key', true), '') AS key, coalesce(current_setting('pgxlock.prefix', true), '') AS prefix,
               string_to_array(nullif(current_setting('pgxlock.states', true), ''), ',') AS states OFFSET 0) f
 WHERE (f.key = '' OR l.lock_name::text = f.key COLLATE "C")
   AND (f.prefix = '' OR starts_with(l.lock_name::text, f.prefix))
   AND (f.states IS NULL OR l.state = ANY (f.states))
