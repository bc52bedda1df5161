package pgxlock

import "github.com/pgxlock/pgxlock/internal/lockkey"

// AdvisoryID returns the number under which PostgreSQL's advisory lock functions
// know a key: the first 8 bytes, big endian, of the SHA-256 of its UTF-8 form.
// It is what the SQL function advisory_lock_key returns in every database
// encoding, so that a program in any language and psql lock the same thing:
//
//	SELECT pg_advisory_xact_lock(advisory_lock_key('invoice:42'))
//
// See https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS.
//
// Of a [RawKey] it is the number itself, of a [RawKey2] its two numbers one behind
// the other.
func AdvisoryID(key string) int64 { return lockkey.Identify(key).Number }

// RawKey names the advisory lock with this number, for programs that already have
// numbers for their locks. Lockers of [NewAdvisoryLocker] and [LockTx] accept it, because
// their locks are advisory locks. Messages show it as #42. It begins with a zero byte,
// so that no name equals it.
func RawKey(id int64) string { return lockkey.Raw(id) }

// RawKey2 is [RawKey] for locks that have two numbers, which PostgreSQL keeps apart from
// locks with one.
func RawKey2(a, b int32) string { return lockkey.RawPair(a, b) }
