-- The widely copied table and functions that pgxlock adopts and replaces, as
-- their users have them installed. Tests upgrade from here, and show what it
-- got wrong.
CREATE TABLE distributed_locks (
  lock_name VARCHAR(255) PRIMARY KEY,
  holder_id VARCHAR(255) NOT NULL,
  acquired_at TIMESTAMPTZ NOT NULL DEFAULT NOW(),
  expires_at TIMESTAMPTZ NOT NULL,
  metadata JSONB DEFAULT '{}'
);

CREATE INDEX idx_locks_expires ON distributed_locks(expires_at);

-- Atomic lock acquisition
CREATE OR REPLACE FUNCTION acquire_lock(
  p_lock_name VARCHAR(255),
  p_holder_id VARCHAR(255),
  p_ttl_seconds INTEGER DEFAULT 30,
  p_metadata JSONB DEFAULT '{}'
) RETURNS BOOLEAN AS $$
DECLARE
  v_now TIMESTAMPTZ := NOW();
  v_expires_at TIMESTAMPTZ := v_now + (p_ttl_seconds || ' seconds')::INTERVAL;
BEGIN
  -- Clean expired
  DELETE FROM distributed_locks
  WHERE lock_name = p_lock_name AND expires_at < v_now;

  -- Try to acquire
  INSERT INTO distributed_locks (lock_name, holder_id, acquired_at, expires_at, metadata)
  VALUES (p_lock_name, p_holder_id, v_now, v_expires_at, p_metadata)
  ON CONFLICT (lock_name) DO UPDATE
  SET holder_id = EXCLUDED.holder_id,
      acquired_at = EXCLUDED.acquired_at,
      expires_at = EXCLUDED.expires_at
  WHERE distributed_locks.holder_id = p_holder_id
     OR distributed_locks.expires_at < v_now;

  RETURN EXISTS (
    SELECT 1 FROM distributed_locks
    WHERE lock_name = p_lock_name AND holder_id = p_holder_id
  );
END;
$$ LANGUAGE plpgsql;

-- Release lock
CREATE OR REPLACE FUNCTION release_lock(
  p_lock_name VARCHAR(255),
  p_holder_id VARCHAR(255)
) RETURNS BOOLEAN AS $$
BEGIN
  DELETE FROM distributed_locks
  WHERE lock_name = p_lock_name AND holder_id = p_holder_id;
  RETURN FOUND;
END;
$$ LANGUAGE plpgsql;
