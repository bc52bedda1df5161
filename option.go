package pgxlock

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/place"
)

// An option configures one call. No option is ignored: a call does not take the type of an
// option that it cannot honour.
type option interface{ apply(*options) error }

// An AcquireOption is an option of [Locker.Acquire], [Locker.TryAcquire], [Locker.AcquireAll],
// [Locker.Do] and [Locker.TryDo]: [MaxWait], [TTL], [Metadata] or [Mode]. A Locker for advisory
// locks refuses TTL and Metadata with [errors.ErrUnsupported]. Options are values; of several
// of one type the last one counts.
type AcquireOption interface {
	DoSQLTxOption
	forAcquire()
}

// A PermitOption is an option of the calls of a [Semaphore] and of [Locker.Lead], whose
// locks are exclusive: [MaxWait], [TTL] or [Metadata].
type PermitOption interface {
	AcquireOption
	forPermit()
}

// A DoTxOption is an option of [Locker.DoTx]: an [AcquireOption], [TxOptions] or [Retries].
type DoTxOption interface {
	option
	forDoTx()
}

// A DoSQLTxOption is an option of [DoSQLTx]: an [AcquireOption] or [Retries].
type DoSQLTxOption interface {
	DoTxOption
	forDoSQLTx()
}

// A LockTxOption is an option of [LockTx], [LockAllTx], [LockSQLTx] and [LockAllSQLTx]:
// [MaxWait], [Mode], [Namespace], [AllowStaleSnapshot] or [Observe].
type LockTxOption interface {
	option
	forLockTx()
}

// A ClaimTxOption is an option of [ClaimTx], [ClaimSQLTx], [AnswerTx] and [AnswerSQLTx]:
// [MaxWait], [Retention], [Schema] or [Observe].
type ClaimTxOption interface {
	option
	forClaimTx()
}

// Which calls take which option.
func (MaxWait) forAcquire()           {}
func (MaxWait) forPermit()            {}
func (MaxWait) forDoSQLTx()           {}
func (MaxWait) forDoTx()              {}
func (MaxWait) forLockTx()            {}
func (MaxWait) forClaimTx()           {}
func (TTL) forAcquire()               {}
func (TTL) forPermit()                {}
func (TTL) forDoSQLTx()               {}
func (TTL) forDoTx()                  {}
func (Metadata) forAcquire()          {}
func (Metadata) forPermit()           {}
func (Metadata) forDoSQLTx()          {}
func (Metadata) forDoTx()             {}
func (Mode) forAcquire()              {}
func (Mode) forDoSQLTx()              {}
func (Mode) forDoTx()                 {}
func (Mode) forLockTx()               {}
func (TxOptions) forDoTx()            {}
func (Retries) forDoSQLTx()           {}
func (Retries) forDoTx()              {}
func (Namespace) forLockTx()          {}
func (AllowStaleSnapshot) forLockTx() {}
func (Observe) forLockTx()            {}
func (Observe) forClaimTx()           {}
func (Retention) forClaimTx()         {}
func (Schema) forClaimTx()            {}

// MaxWait bounds the wait for a lock, from the call to the grant, including the time to
// connect. It does not bound how long the lock is held, as a timeout on the context of
// [Locker.Do] would. When it is over, the error is [ErrNotAcquired] if the server ever said
// that the key is busy, and otherwise the error that kept the Locker from asking. Zero or
// less means [NoWait]. Default: only the context bounds the wait.
type MaxWait time.Duration

// NoWait tries once and does not wait for the holder. Reaching the server may still take time:
// at most 5 s for a lease; at most 12 s for an advisory lock if it must replace its connection;
// and 5 s more with [Shared], which first checks whether a writer waits. A shared request for a
// lease keeps trying for half a second while other holders join or leave.
const NoWait = MaxWait(0)

// TTL is that of [LeaseConfig] for one lock: at least 1 s. Default: the Locker's.
type TTL time.Duration

// Metadata is shown to operators with the lock. It is valid UTF-8 without zero bytes, and is
// stored as a JSON string of at most 64 KiB.
type Metadata string

// Mode says which other locks on the key a lock excludes: [Exclusive], the default, all of
// them; [Shared], the exclusive ones. A shared request waits behind an exclusive request that
// came before it, so that writers are not starved, or is refused if it does not wait.
// [Lock.Downgrade] makes an exclusive lock a shared one.
//
// A caller that is refused the exclusive lease finds "*shared" as the [Error].Holder;
// [Locker.Holders] returns each of the sharing holders. Shared leases need the migrations
// ([ErrSchema]).
type Mode uint8

// The modes of a lock.
const (
	Exclusive = Mode(hold.Exclusive)
	Shared    = Mode(hold.Shared)
)

// Schema is the schema in which the migrations installed pgxlock. To name it is to trust its
// owner. Default for [PurgeClaims]: that of [LeaseConfig]; for calls in the caller's
// transaction: the schema in which its search_path finds the function, so name it where others
// may create functions in such a schema.
type Schema string

// AllowStaleSnapshot makes [LockTx] accept a snapshot that is older than the lock, for
// transactions that read nothing that the lock protects, or whose writes would then fail with
// SQLSTATE 40001.
type AllowStaleSnapshot bool

// Retention is how long a claim of [ClaimTx] or [AnswerTx] lasts; after it the key can be
// claimed again. It counts from the call, and so must be longer than the transaction. At
// least 1 ms. Default: until [PurgeClaims] removes the claim; 100 years for an answer.
type Retention time.Duration

// TxOptions are the options with which [Locker.DoTx] begins its transaction. Default: the
// role's settings, READ COMMITTED unless somebody changed them.
type TxOptions pgx.TxOptions

// Retries is how often [Locker.DoTx] may begin its transaction again. Default: 0.
type Retries int

// options are the options of one call, over its defaults.
type options struct {
	hold.Request
	bounded       bool // the wait, by maxWait
	maxWait       time.Duration
	schema        string
	namespace     string
	staleSnapshot bool
	retention     *time.Duration // nil: unlimited
	retries       int
	tx            pgx.TxOptions
	observe       Observe // nil: nobody
}

func (w MaxWait) apply(o *options) error {
	o.bounded, o.maxWait = true, max(time.Duration(w), 0)
	return nil
}

func (t TTL) apply(o *options) error {
	o.TTL = time.Duration(t)
	return checkTTL("TTL", o.TTL)
}

func (m Mode) apply(o *options) error {
	if m != Exclusive && m != Shared {
		return fmt.Errorf("%v is not a mode; use Exclusive or Shared", m)
	}
	o.Mode = hold.Mode(m)
	return nil
}

func (m Mode) String() string {
	switch m {
	case Exclusive:
		return "Exclusive"
	case Shared:
		return "Shared"
	}
	return fmt.Sprintf("Mode(%d)", uint8(m))
}

func (s Schema) apply(o *options) error {
	o.schema = string(s)
	if s == "" {
		return errors.New("Schema is empty; remove the option to use the search_path")
	}
	if err := place.CheckName(o.schema); err != nil {
		return fmt.Errorf("Schema %.80q %w", o.schema, err)
	}
	return nil
}

func (n Namespace) apply(o *options) error {
	o.namespace = string(n)
	return lockkey.CheckNamespace(o.namespace)
}

func (r Retention) apply(o *options) error {
	d := time.Duration(r)
	o.retention = &d
	if d < time.Millisecond || d > maxTTL {
		return fmt.Errorf("Retention is %s, it must be between 1 ms and 100 years", d)
	}
	return nil
}

func (t TxOptions) apply(o *options) error {
	o.tx = pgx.TxOptions(t)
	return nil
}

func (r Retries) apply(o *options) error {
	o.retries = int(r)
	if r < 0 {
		return fmt.Errorf("Retries is %d, it must be 0 or more", int(r))
	}
	return nil
}

func (a AllowStaleSnapshot) apply(o *options) error {
	o.staleSnapshot = bool(a)
	return nil
}

const maxMetadata = 64 << 10

func (m Metadata) apply(o *options) error {
	if !utf8.ValidString(string(m)) || strings.ContainsRune(string(m), 0) {
		return errors.New("Metadata must be valid UTF-8 without zero bytes; encode binary data")
	}
	var quoted strings.Builder
	encoder := json.NewEncoder(&quoted)
	encoder.SetEscapeHTML(false) // the server counts characters without escapes
	if err := encoder.Encode(string(m)); err != nil {
		return err
	}
	s := strings.TrimSuffix(quoted.String(), "\n")
	if len(s) > maxMetadata {
		return fmt.Errorf("Metadata has %d bytes as a JSON string, %d are allowed; store more elsewhere and name it here", len(s), maxMetadata)
	}
	o.Metadata = &s
	return nil
}

// minTTL keeps margins and renewals longer than networks and commits take. maxTTL is the
// longest that the SQL functions accept.
const (
	minTTL = time.Second
	maxTTL = 100 * 360 * 24 * time.Hour // PostgreSQL counts 360 days to a year
)

func checkTTL(name string, ttl time.Duration) error {
	if ttl < minTTL || ttl > maxTTL {
		return fmt.Errorf("%s is %s, it must be between %s and 100 years", name, ttl, minTTL)
	}
	return nil
}

// noWait reports whether the call must not wait for a holder.
func (o *options) noWait() bool { return o.bounded && o.maxWait == 0 }

// bound returns what bounds the wait; nil: nothing.
func (o *options) bound() *time.Duration {
	if !o.bounded {
		return nil
	}
	return &o.maxWait
}

// collect applies the options of a call over its defaults.
func collect[O option](o *options, opts []O) error {
	for _, opt := range opts {
		if any(opt) == nil {
			return errors.New("an option is nil; remove it")
		}
		if err := opt.apply(o); err != nil {
			return err
		}
	}
	return nil
}

// ExponentialBackoff returns a function that says how long to pause before the next try, for
// [LeaseConfig.Backoff], [AdvisoryConfig.Backoff] or a program's own retries. After attempt 0,
// or a negative one, the pause is first; each further attempt doubles it, up to most. Random
// jitter shortens each pause by up to half, so that callers that failed together do not try
// again together. The function keeps no state, and serves any number of goroutines. first is
// raised to at least 1 ms, and most to at least first.
func ExponentialBackoff(first, most time.Duration) func(attempt int) time.Duration {
	return clock.Backoff(first, most)
}
