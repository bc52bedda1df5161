package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/advisory"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/place"
	"github.com/pgxlock/pgxlock/internal/waitqueue"
)

// NewAdvisoryLocker returns a Locker whose locks are PostgreSQL's session-level advisory locks,
// for which nothing needs to be installed. The lock for a key has the number [AdvisoryID](key),
// and excludes callers of pg_advisory_lock in any language, and of [LockTx] and
// pg_advisory_xact_lock.
//
// The Locker holds all its locks on one connection. That ends at Close, when the process or the
// server ends, at a failover, or when the server has received nothing for [AdvisoryConfig].TTL.
// Then all locks are lost together, and the Locker connects again for the next ones.
// [Lock.Lost] is closed within milliseconds of the server's message, or when that can no longer
// be expected in time. When the server ends a session, it frees the locks before the client can
// know.
//
// Where the migrations are installed and the role may use the queue of waiters, processes wake
// each other, by two more connections: one that listens, and one for the queue, which is closed
// when it has been idle for the pool's MaxConnIdleTime, but for at least 2 s. Otherwise a
// caller that waits for another process polls.
//
// The connection must lead to the server itself. The Locker refuses a standby ([ErrReadOnly])
// and a pooler in transaction or statement mode ([ErrPooler]); for one in session mode see
// [AdvisoryConfig.SessionPooler]. If a proxy passes a message to a backend other than the
// session's, all locks are lost with ErrPooler at that message, and the other backend takes
// none.
func NewAdvisoryLocker(pool *pgxpool.Pool, cfg *AdvisoryConfig) (*Locker, error) {
	c, err := cfg.withDefaults()
	if err == nil && pool == nil {
		err = errors.New("the pool is nil; make one with pgxpool.New")
	}
	if err != nil {
		return nil, &Error{Op: "new", Kind: KindAdvisory, Err: err}
	}
	l := newLocker(KindAdvisory, clock.System, c.Backoff, c.Logger)
	l.observe, l.space = c.Observe, string(c.Namespace)
	a := advisory.New(pool.Config(), advisory.Config{Owner: c.Owner, Schema: c.Schema, Namespace: l.space, TTL: c.TTL, MaxLocks: c.MaxLocks, Tokens: c.Tokens, SessionPooler: c.SessionPooler})
	l.connect(waitqueue.Server{Owner: c.Owner, Place: a.Installation(), Runner: a, Dialer: a.Dialer(), Session: a})
	l.use(a)
	a.Use(l.host())
	return l, nil
}

// AdvisoryConfig configures a Locker of [NewAdvisoryLocker]. A nil *AdvisoryConfig means
// the defaults.
type AdvisoryConfig struct {
	// TTL bounds how long the server keeps the locks of a process from which it receives
	// nothing, because the network is gone or the process is frozen: then the server ends the
	// session (idle_session_timeout). The Locker counts its locks as lost a tenth of TTL
	// earlier, but at least 100 ms, and pings after a third of TTL in which it sent nothing
	// else. At least 1 s, at most 24 days; default 30 s. Negative: no bound, so the server
	// keeps the locks until TCP gives up the connection, which can take hours.
	TTL time.Duration

	// MaxLocks is how many keys this Locker may hold at once; the next one fails with
	// [ErrMaxLocks]. Each key takes an entry in the server's lock table, which all sessions
	// share and need. Default: a tenth of the entries that the lock table is sure to have, at
	// most 2048.
	MaxLocks int

	// Tokens gives each lock a fencing token, [Lock.Token], from the same sequence as leases,
	// and lets transactions fence with [Lock.Fence]. It needs the migrations ([ErrSchema]), and
	// each acquisition waits for a commit, which concurrent ones share. Callers of one Locker
	// that share a lock share its token. Readers in several processes have different tokens,
	// between those of the writers before and after them: compare a reader's token only with
	// writers'. Only locks taken with Tokens are fenced against each other: pg_advisory_lock,
	// LockTx and Lockers without Tokens exclude them, but do not wait for fenced transactions.
	Tokens bool

	// Schema is as in [LeaseConfig], if there is such a schema: for Tokens and for the queue in
	// which processes wait. Without the migrations, waiters poll.
	Schema string

	// Namespace keeps the locks apart from those of other applications and tenants. Default:
	// none. A Locker with one refuses a [RawKey].
	Namespace Namespace

	// SessionPooler declares that the pooler between the program and the server is in
	// session mode, which the Locker cannot detect for certain. If the pooler turns out to
	// share its server connections, it is refused with [ErrPooler], and all locks are lost.
	SessionPooler bool

	// Owner, Backoff, Logger and Observe are as in [LeaseConfig]. Operators see the Owner also
	// in application_name, unless the pool's configuration sets one. Backoff also serves for a
	// key whose holder does not notify waiters: no Locker, or one without the queue of waiters.
	Owner   string
	Backoff func(attempt int) time.Duration
	Logger  *slog.Logger
	Observe func(context.Context, Event)
}

// maxAdvisoryTTL is what idle_session_timeout can express, in whole days.
const maxAdvisoryTTL = 24 * 24 * time.Hour

// withDefaults checks a configuration and fills in what was left out.
func (c *AdvisoryConfig) withDefaults() (AdvisoryConfig, error) {
	var cfg AdvisoryConfig
	if c != nil {
		cfg = *c
	}
	if cfg.TTL == 0 {
		cfg.TTL = 30 * time.Second
	}
	if cfg.TTL > 0 && cfg.TTL < minTTL || cfg.TTL > maxAdvisoryTTL {
		return cfg, fmt.Errorf("AdvisoryConfig.TTL is %s, it must be between %s and 24 days, or negative for none", cfg.TTL, minTTL)
	}
	if cfg.MaxLocks < 0 {
		return cfg, fmt.Errorf("AdvisoryConfig.MaxLocks is %d, it must be 1 or more, or 0 for the default", cfg.MaxLocks)
	}
	if err := place.CheckName(cfg.Schema); err != nil {
		return cfg, fmt.Errorf("AdvisoryConfig.Schema %.80q %w", cfg.Schema, err)
	}
	if cfg.Namespace != "" {
		if err := lockkey.CheckNamespace(string(cfg.Namespace)); err != nil {
			return cfg, fmt.Errorf("AdvisoryConfig.Namespace is %.80q: %w", cfg.Namespace, err)
		}
	}
	var err error
	if cfg.Owner, err = lockkey.Owner("AdvisoryConfig", cfg.Owner); err != nil {
		return cfg, err
	}
	cfg.Backoff, cfg.Logger = orDefaults(cfg.Backoff, cfg.Logger)
	return cfg, nil
}

// AdvisoryID returns the number of the advisory lock for a key: the first 8 bytes, big endian,
// of the SHA-256 of the key in UTF-8. The SQL function advisory_lock_key returns the same
// number in every database encoding, so programs in any language and psql can lock the same
// thing:
//
//	SELECT pg_advisory_xact_lock(advisory_lock_key('invoice:42'))
//
// For a key of a [Namespace] it returns the number of the lock in it; for a [RawKey] the number
// itself, for a [RawKey2] a<<32 | b, where b is taken as unsigned.
func AdvisoryID(key string) int64 { return lockkey.Identify(key).Number }

// Namespace keeps the advisory locks of one application or tenant apart from those of others
// in the database: as [AdvisoryConfig.Namespace], and as an option of [LockTx]. A key in
// another namespace, or in none, is another lock. A namespace has 1 to 63 characters, none of
// them "/". In SQL, advisory_lock_key_in(namespace, key) returns the number of a lock. It keeps
// apart programs that use it, and is no protection from a role that locks numbers.
type Namespace string

// Key returns the key that names the lock of key in the namespace to calls without one:
// [AdvisoryID], a filter of package monitor, a Locker without a namespace. Operators see it as
// @billing/invoice:42.
func (n Namespace) Key(key string) string { return lockkey.In(string(n), key) }

// RawKey names the advisory lock with this number, for programs that have numbers for their
// locks already: [LockTx] and Lockers of [NewAdvisoryLocker] accept it. Messages show it as
// #42. It begins with a zero byte, so that no name equals it.
func RawKey(id int64) string { return lockkey.ID{Number: id}.Key() }

// RawKey2 is [RawKey] for locks that have two numbers, which PostgreSQL keeps apart from
// locks with one.
func RawKey2(a, b int32) string {
	return lockkey.ID{Number: int64(a)<<32 | int64(uint32(b)), Pair: true}.Key()
}
