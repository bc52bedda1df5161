package pgxlock

import "github.com/pgxlock/pgxlock/internal/lockkey"

// AdvisoryID returns the number of the advisory lock for a key: the first 8 bytes, big
// endian, of the SHA-256 of the key in UTF-8. The SQL function advisory_lock_key returns
// the same number in every database encoding, so programs in any language and psql can lock
// the same thing:
//
//	SELECT pg_advisory_xact_lock(advisory_lock_key('invoice:42'))
//
// See https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS.
//
// For a [RawKey] it returns the number itself, for a [RawKey2] a<<32 | b, where b is taken
// as unsigned.
func AdvisoryID(key string) int64 { return lockkey.Identify(key).Number }

// RawKey names the advisory lock with this number, for programs that already have
// numbers for their locks. Lockers of [NewAdvisoryLocker] and [LockTx] accept it, because
// their locks are advisory locks. Messages show it as #42. It begins with a zero byte,
// so that no name equals it.
func RawKey(id int64) string { return lockkey.Raw(id) }

// RawKey2 is [RawKey] for locks that have two numbers, which PostgreSQL keeps apart from
// locks with one.
func RawKey2(a, b int32) string { return lockkey.RawPair(a, b) }
