package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// A program on database/sql makes a pool for its Locker only.
func TestPoolThatOnlyALockerHasNeverConnects(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pool := unconnected(t)
		locks, err := pgxlock.NewLeaseLocker(pool, nil)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour) // the pool checks its connections each minute
		if err := locks.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// connectTracer records how connections are made.
type connectTracer struct {
	pgx.QueryTracer // nil: pgx asks for the interface of a query tracer, too

	mu      sync.Mutex
	configs []*pgx.ConnConfig
}

func (c *connectTracer) TraceConnectStart(ctx context.Context, data pgx.TraceConnectStartData) context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.configs = append(c.configs, data.ConnConfig)
	return ctx
}

func (c *connectTracer) TraceConnectEnd(context.Context, pgx.TraceConnectEndData) {}

func (c *connectTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (c *connectTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestLockerConnectsAsItsPoolDoes(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	seen := new(connectTracer)
	var dialled atomic.Int32
	var user string
	pool := db.NewPool(t, func(c *pgxpool.Config) {
		user = c.ConnConfig.User
		c.ConnConfig.Tracer, c.ConnConfig.Password = seen, "geheim"
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			dialled.Add(1)
			return dial(ctx, network, addr)
		}
		c.ConnConfig.RuntimeParams["application_name"] = "billing"
		c.ConnConfig.OnNotification = func(*pgconn.PgConn, *pgconn.Notification) { t.Error("the pool got a notification of the Locker") }
	})
	locks := testkit.NewLocker(t, &pgtest.DB{Pool: pool, URL: db.URL, Name: db.Name}, &pgxlock.LeaseConfig{Backoff: testkit.Seldom})
	others := testkit.Acquire(t, testkit.NewLocker(t, db, nil), "k")
	granted := testkit.Waits(t, locks, "k")
	testkit.UntilQueued(t, db, "k", 1)
	testkit.Release(t, others)
	lock := <-granted // by a notification
	if err := errors.Join(lock.Renew(t.Context()), lock.Release(t.Context())); err != nil {
		t.Error(err)
	}
	seen.mu.Lock()
	defer seen.mu.Unlock()
	// One for requests, one for renewals, and one that listens.
	if dials := dialled.Load(); dials < 3 || len(seen.configs) < 3 {
		t.Errorf("%d connections by the pool's DialFunc, %d seen by its Tracer, want 3", dials, len(seen.configs))
	}
	for i, got := range seen.configs {
		if got.Password != "geheim" || got.User != user || got.RuntimeParams["application_name"] != "billing" {
			t.Errorf("connection %d: %q %q", i, got.User, got.RuntimeParams)
		}
	}
}

func TestCallersPoolMayBeUsedUpByItsOwnTransaction(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	pool := db.NewPool(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	locks := testkit.NewLocker(t, &pgtest.DB{Pool: pool, URL: db.URL, Name: db.Name}, nil)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	fenced, other := testkit.Acquire(t, locks, "fenced"), testkit.Acquire(t, locks, "other")
	if err := fenced.Fence(t.Context(), tx); err != nil {
		t.Errorf("Fence: %v", err)
	}
	if err := errors.Join(fenced.Renew(t.Context()), other.Release(t.Context())); err != nil {
		t.Errorf("inside the transaction: %v", err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Error(err)
	}
	if err := fenced.Release(t.Context()); err != nil {
		t.Errorf("Release: %v", err)
	}
	untilOnlyHeld(t, db)
}

func TestLockerHasTwoConnectionsOfItsOwnAndNoneAfterClose(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	pool := db.NewPool(t)
	locks, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{Owner: "two"})
	if err != nil {
		t.Fatal(err)
	}
	if pids := testkit.Backends(t, db, "two"); len(pids) != 0 {
		t.Errorf("connected before the first use: %v", pids)
	}
	var working sync.WaitGroup
	for i := range 32 {
		working.Go(func() {
			lock, err := locks.Acquire(t.Context(), fmt.Sprint("key:", i))
			if err == nil {
				err = errors.Join(lock.Renew(t.Context()), lock.Release(t.Context()))
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	working.Wait()
	pgtest.Until(t, "the Locker has two connections", func() bool { return len(testkit.Backends(t, db, "two")) == 2 }) // not three while one that failed ends
	if n := pool.Stat().TotalConns(); n != 0 {
		t.Errorf("the caller's pool has %d connections, which it was never asked for", n)
	}
	if err := locks.Close(t.Context()); err != nil {
		t.Error(err)
	}
	pgtest.Until(t, "the Locker's connections are gone", func() bool { return len(testkit.Backends(t, db, "two")) == 0 })
}

func TestRoleSettingsCostNoLock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Controlled(t, testkit.Migrated(t))
	use := func(t *testing.T, settings map[string]string) {
		t.Helper()
		testkit.Set(t, db, settings)
		patient := db.NewPool(t, func(c *pgxpool.Config) { // between its own statements a slow machine may take long
			for _, name := range []string{"idle_in_transaction_session_timeout", "idle_session_timeout", "statement_timeout"} {
				c.ConnConfig.RuntimeParams[name] = "0"
			}
		})
		useLock(t, testkit.NewLocker(t, db, nil), patient, "k")
		if got := testkit.Rows(t, db); len(got) != 0 {
			t.Errorf("after the release: %v", got)
		}
	}
	for name, value := range testkit.Hostile {
		t.Run(name, func(t *testing.T) { use(t, map[string]string{name: value}) })
	}
	t.Run("all", func(t *testing.T) { use(t, testkit.Together()) })
	t.Run("force_custom_plan", func(t *testing.T) { use(t, map[string]string{"plan_cache_mode": "force_custom_plan"}) })
	t.Run("repeatable read", func(t *testing.T) {
		use(t, map[string]string{"default_transaction_isolation": "'repeatable read'"})
	})
}

func TestTimeoutsOfARoleEndNoStatementAndNoConnection(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Controlled(t, testkit.Migrated(t))
	blocker := db.Connect(t)
	testkit.Set(t, db, testkit.Together())
	locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "patient"})
	held := testkit.Acquire(t, locks, "held")
	if err := held.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := testkit.Backends(t, db, "patient")

	// A statement that waits for longer than both timeouts, and not for as long as it may:
	// where this machine stands still, another one.
	for try := 1; ; try++ {
		if _, err := blocker.Exec(t.Context(), "begin; lock table pgxlock_epoch in access exclusive mode"); err != nil {
			t.Fatal(err)
		}
		acquired := make(chan error, 1)
		go func() {
			_, err := locks.Acquire(t.Context(), "k")
			acquired <- err
		}()
		pgtest.Until(t, "the request has waited for longer than the timeouts", func() bool {
			return len(acquired) > 0 || testkit.Query[bool](t, db, `select exists (select from pg_locks
				where relation = 'pgxlock_epoch'::regclass and not granted and clock_timestamp() - waitstart > '600 ms')`)
		})
		if _, err := blocker.Exec(t.Context(), "rollback"); err != nil {
			t.Fatal(err)
		}
		err := <-acquired
		if err == nil {
			break
		}
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || pgErr.Code != "55P03" || try == 10 {
			t.Fatal(err)
		}
	}
	pgtest.Until(t, "the connections have been idle for longer than the timeout", func() bool {
		return testkit.Query[bool](t, db, `select bool_and(state = 'idle' and clock_timestamp() - state_change > '3200 ms') is not false
			from pg_stat_activity where datname = current_database() and application_name = 'pgxlock patient'`)
	})
	if after := testkit.Backends(t, db, "patient"); !slices.Equal(before, after) {
		t.Errorf("backends %v, and now %v", before, after)
	}
}

// withoutDeadlines is a connection as golang.org/x/crypto/ssh makes it.
type withoutDeadlines struct{ net.Conn }

var errNoDeadlines = errors.New("tcpChan: deadline not supported")

func (withoutDeadlines) SetDeadline(time.Time) error      { return errNoDeadlines }
func (withoutDeadlines) SetReadDeadline(time.Time) error  { return errNoDeadlines }
func (withoutDeadlines) SetWriteDeadline(time.Time) error { return errNoDeadlines }

// pooled is a kind of Locker on a database of its own.
type pooled struct {
	kind   pgxlock.Kind
	db     *pgtest.DB
	locker func(t *testing.T, on *pgtest.DB, owner string) *pgxlock.Locker
	use    func(t *testing.T, locks *pgxlock.Locker, callers *pgtest.DB, key string) // excludes the callers of SQL
}

// eachPooled runs test for leases and for advisory locks.
func eachPooled(t *testing.T, test func(t *testing.T, p pooled)) {
	t.Helper()
	t.Parallel()
	for name, p := range map[string]pooled{
		"leases": {pgxlock.KindLease, testkit.Migrated(t), func(t *testing.T, on *pgtest.DB, owner string) *pgxlock.Locker {
			t.Helper()
			return testkit.NewLocker(t, on, &pgxlock.LeaseConfig{Owner: owner})
		}, func(t *testing.T, locks *pgxlock.Locker, callers *pgtest.DB, key string) {
			t.Helper()
			useLock(t, locks, callers.Pool, key)
		}},
		"advisory locks": {pgxlock.KindAdvisory, pgtest.New(t), func(t *testing.T, on *pgtest.DB, owner string) *pgxlock.Locker {
			t.Helper()
			return testkit.NewAdvisory(t, on, &pgxlock.AdvisoryConfig{Owner: owner})
		}, testkit.UseAdvisory},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, p)
		})
	}
}

func TestEveryQueryModeOfThePoolIsGoodEnough(t *testing.T) {
	pgtest.Long(t)
	eachPooled(t, func(t *testing.T, p pooled) {
		for _, mode := range []pgx.QueryExecMode{
			pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
			pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
		} {
			for _, capacity := range []int{0, 1, 512} {
				t.Run(fmt.Sprint(mode, ", capacity ", capacity), func(t *testing.T) {
					pool := p.db.NewPool(t, func(c *pgxpool.Config) {
						c.ConnConfig.DefaultQueryExecMode = mode
						c.ConnConfig.StatementCacheCapacity, c.ConnConfig.DescriptionCacheCapacity = capacity, capacity
					})
					callers := &pgtest.DB{Pool: pool, URL: p.db.URL, Name: p.db.Name}
					if capacity == 0 && (mode == pgx.QueryExecModeCacheStatement || mode == pgx.QueryExecModeCacheDescribe) {
						callers = p.db // pgx refuses this mode for the pool's own statements
					}
					locks := p.locker(t, &pgtest.DB{Pool: pool}, "")
					for range 3 { // what is cached must be right the next time as well
						p.use(t, locks, callers, t.Name())
					}
				})
			}
		}
	})
}

func TestPoolsHooksAreHonoured(t *testing.T) {
	eachPooled(t, func(t *testing.T, p pooled) {
		through := func(configure func(*pgxpool.Config)) *pgtest.DB {
			return &pgtest.DB{Pool: p.db.NewPool(t, configure), URL: p.db.URL, Name: p.db.Name}
		}
		failure := errors.New("not today")

		t.Run("BeforeConnect says where, and as whom", func(t *testing.T) {
			pool := through(func(c *pgxpool.Config) {
				right := c.ConnConfig.Copy()
				c.ConnConfig.Host, c.ConnConfig.Port, c.ConnConfig.Fallbacks = "192.0.2.1", 1, nil
				c.ConnConfig.User, c.ConnConfig.Password = "nobody", "expired"
				c.BeforeConnect = func(_ context.Context, config *pgx.ConnConfig) error {
					config.Host, config.Port, config.Fallbacks = right.Host, right.Port, right.Fallbacks
					config.User, config.Password = right.User, right.Password
					return nil
				}
			})
			p.use(t, p.locker(t, pool, ""), p.db, t.Name())
		})
		for name, configure := range map[string]func(*pgxpool.Config){
			"BeforeConnect": func(c *pgxpool.Config) {
				c.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { return failure }
			},
			"AfterConnect": func(c *pgxpool.Config) { c.AfterConnect = func(context.Context, *pgx.Conn) error { return failure } },
			"ValidateConnect": func(c *pgxpool.Config) {
				c.ConnConfig.ValidateConnect = func(context.Context, *pgconn.PgConn) error { return failure }
			},
		} {
			t.Run(name+" refuses", func(t *testing.T) {
				locks := p.locker(t, through(configure), name)
				for range 2 {
					_, err := locks.Acquire(t.Context(), t.Name())
					if !errors.Is(err, failure) || errors.Is(err, pgxlock.ErrNotAcquired) {
						t.Errorf("%v, want the hook's error", err)
					}
				}
				pgtest.Until(t, "the refused connections are closed", func() bool { return len(testkit.Backends(t, p.db, name)) == 0 })
			})
		}
		t.Run("a connection through an SSH client has no deadlines", func(t *testing.T) {
			pool := through(func(c *pgxpool.Config) {
				dial := c.ConnConfig.DialFunc
				c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
					conn, err := dial(ctx, network, addr)
					return withoutDeadlines{conn}, err
				}
			})
			p.use(t, p.locker(t, pool, ""), p.db, t.Name())
		})
		t.Run("ContextWatcherHandler is the pool's alone", func(t *testing.T) {
			pool := through(func(c *pgxpool.Config) {
				c.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
					t.Error("it may end our wait for a notification only after its DeadlineDelay")
					return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: time.Second}
				}
			})
			p.use(t, p.locker(t, pool, ""), p.db, t.Name())
		})
		t.Run("the application_name is the caller's, if there is one", func(t *testing.T) {
			pool := through(func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["application_name"] = "billing" })
			lock := testkit.Acquire(t, p.locker(t, pool, ""), t.Name())
			if err := lock.Renew(t.Context()); err != nil {
				t.Error(err)
			}
			want := map[pgxlock.Kind]int{pgxlock.KindLease: 2, pgxlock.KindAdvisory: 1}[p.kind]
			if n := testkit.Query[int](t, p.db, "select count(*) from pg_stat_activity where datname = current_database() and application_name = 'billing'"); n != want {
				t.Errorf("%d connections of that name, want %d", n, want)
			}
		})
	})
}

func TestPoolsAfterConnectIsHonouredByLeases(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	through := func(configure func(*pgxpool.Config)) *pgtest.DB {
		return &pgtest.DB{Pool: db.NewPool(t, configure), URL: db.URL, Name: db.Name}
	}

	t.Run("a warning of somebody else's is no failure", func(t *testing.T) {
		pool := through(func(c *pgxpool.Config) {
			c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, "load 'auto_explain'; set auto_explain.log_min_duration = 0; set auto_explain.log_level = 'warning'")
				return err
			}
		})
		useLock(t, testkit.NewLocker(t, pool, nil), db.Pool, "warned")
	})
	t.Run("AfterConnect sets the role", func(t *testing.T) {
		// A role that every server has, so that none need be made.
		pool := through(func(c *pgxpool.Config) {
			c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, "set role pg_signal_backend")
				return err
			}
		})
		locks := testkit.NewLocker(t, pool, nil)
		_, err := locks.Acquire(t.Context(), t.Name())
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || pgErr.Code != "42501" {
			t.Errorf("without privileges: %v, want SQLSTATE 42501", err)
		}
		db.Exec(t, "grant select, insert, update, delete on distributed_locks, pgxlock_waiters to pg_signal_backend")
		useLock(t, locks, db.Pool, t.Name())
	})
	if n := testkit.Query[int](t, db, "select count(*) from distributed_locks where expires_at > clock_timestamp() + interval '1 hour'"); n != 0 {
		t.Error("a lease has another TTL than it was asked for")
	}
}
