// The upgrade of what testdata/seed.sql installs, in use, and the way back.

package migrations_test

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// newSeed makes a database that has the seed.
func newSeed(t *testing.T) *pgtest.DB {
	t.Helper()
	text, err := os.ReadFile("../testdata/seed.sql")
	must(t, err)
	db := pgtest.New(t)
	db.Exec(t, string(text))
	return db
}

func TestSeedIsAdoptedAndGivenBackByEveryWay(t *testing.T) {
	t.Parallel()
	fresh := atVersion(t, newest)
	want := catalog(t, fresh)
	const rows = "select string_agg(concat_ws(',', lock_name, holder_id, acquired_at, expires_at, metadata), ' ' order by lock_name) from distributed_locks"
	db := newSeed(t)
	db.Exec(t, "insert into distributed_locks select 'old ' || i, 'h', now(), now() - interval '1 day', '{\"i\": 1}' from generate_series(1, 3) i")
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			forget(t, db)
			before, content := catalog(t, db), ask[string](t, db.Pool, rows, pgx.QueryExecModeExec)
			for range 2 {
				must(t, way.up(t, db.URL))
				sameCatalog(t, catalog(t, db), want) // which has no idx_locks_expires, and lock_name COLLATE "C"
				expect(t, db.Pool, content, rows, pgx.QueryExecModeExec)
				expect(t, db.Pool, 3, "select count(distinct fencing_token) from distributed_locks where fencing_token > 0")
				must(t, way.down(t, db.URL))
				sameCatalog(t, catalog(t, db), before)
				expect(t, db.Pool, content, rows, pgx.QueryExecModeExec)
			}
			expect(t, db.Pool, true, "select acquire_lock('k', 'a') and release_lock('k', 'a')") // the seed's own again
		})
	}
}

func TestSeedComesBackWithItsOwnersChanges(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := newSeed(t)
	role := newRole(t, db)
	db.Exec(t, `alter table distributed_locks set (fillfactor = 70, autovacuum_enabled = off);
		alter table distributed_locks alter lock_name type varchar(100) collate "POSIX";
		alter function acquire_lock security definer set search_path = public cost 7;
		drop function release_lock;
		drop index idx_locks_expires; create index idx_locks_expires on distributed_locks (expires_at desc) with (fillfactor = 50);
		create index of_the_owner on distributed_locks (holder_id);
		grant select, insert on distributed_locks to `+role+`; revoke execute on function acquire_lock from public; grant execute on function acquire_lock to `+role)
	before := catalog(t, db)
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	expect(t, db.Pool, false, "select has_function_privilege('public', 'acquire_lock(varchar, varchar, integer, jsonb)', 'execute')")
	expect(t, db.Pool, true, "select acquire_lock('k', 'a')")
	expect(t, db.Pool, true, "select release_lock('k', 'a')")
	must(t, migrations.Down(t.Context(), db.Pool, nil))
	sameCatalog(t, catalog(t, db), before)
}

func TestOldCallersGoOnWithinOneSession(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := newSeed(t)
	conn := db.Connect(t)
	for name, query := range map[string]string{
		"acquire": "select acquire_lock($1, $2, $3)", "short": "select acquire_lock($1, $2)",
		"release": "select release_lock($1, $2)", "look": "select holder_id from distributed_locks where lock_name = $1",
	} {
		_, err := conn.Prepare(t.Context(), name, query)
		must(t, err)
	}
	_, err := conn.Exec(t.Context(), "prepare by_sql (text, text, int) as select acquire_lock($1, $2, $3)")
	must(t, err)
	calls := func() {
		expect(t, conn, true, "acquire", "k", "a", 60)
		expect(t, conn, false, "acquire", "k", "b", 60)
		expect(t, conn, false, "short", "k", "b")
		expect(t, conn, "a", "look", "k")
		expect(t, conn, false, "execute by_sql('k', 'b', 30)")
		expect(t, conn, true, "select acquire_lock('k', 'a')")
		expect(t, conn, true, "select acquire_lock('k', 'a', 30)")
		expect(t, conn, true, `select acquire_lock('k', 'a', 30, '{"pod": 7}')`)
		expect(t, conn, true, "select acquire_lock(p_holder_id => 'a', p_lock_name => 'k')")
		expect(t, conn, false, "release", "k", "b")
		expect(t, conn, true, "release", "k", "a")
		expect(t, conn, false, "select release_lock('k', 'a')")
	}
	for range 6 { // more than the five after which a plan is kept
		calls()
	}
	expect(t, conn, true, "acquire", "held", "a", 600)
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	for range 6 {
		calls()
	}
	expect(t, conn, false, "acquire", "held", "b", 60)
	expect(t, conn, true, "release", "held", "a")
	must(t, migrations.Down(t.Context(), db.Pool, nil))
	calls()
}

func TestSeedsGrantsAreEnough(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := newSeed(t)
	role := newRole(t, db)
	db.Exec(t, "grant select, insert, update, delete on distributed_locks to "+role)
	conn := pgtest.Connect(t, as(t, db, "role", role))
	expect(t, conn, true, "select acquire_lock('held', 'me', 600)")
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	goodAndBadCalls(t, conn)
	expect(t, conn, true, "select assert_lock_held('held', 'me') > 0")
	expect(t, conn, true, "select extend_lock('held', 'me', 60)")
	expect(t, conn, true, "select release_lock('held', 'me')")
	expect(t, conn, int(newest), "select pgxlock_version()")
	expect(t, conn, true, "select lock_tx('k')")
	_, err := conn.Exec(t.Context(), "select claim_once('k')") // its table is new
	refuse(t, err, pgerrcode.InsufficientPrivilege)
	db.Exec(t, "grant select, insert, update, delete on pgxlock_claims to "+role) // as docs/rights.md says
	callsInTransactions(t, conn)
}

func TestViewKeepsTheCollationAndASecondIndexGuardsTheNames(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := newSeed(t)
	db.Exec(t, "create view of_the_owner as select lock_name from distributed_locks")
	before := catalog(t, db)
	var warnings []string
	pool := db.NewPool(t, func(c *pgxpool.Config) {
		c.ConnConfig.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { warnings = append(warnings, n.Severity+" "+n.Message) }
	})
	must(t, migrations.Up(t.Context(), pool, nil))
	if len(warnings) != 1 || !strings.HasPrefix(warnings[0], "WARNING pgxlock: ") || !strings.Contains(warnings[0], "lock_name keeps its collation") {
		t.Errorf("warnings: %q", warnings)
	}
	expect(t, db.Pool, 2, `select count(*) from pg_index where indrelid = 'distributed_locks'::regclass and indisunique`)
	expect(t, db.Pool, true, `select 'C' = (select collname from pg_collation where oid = indcollation[0]) from pg_index where indexrelid = 'distributed_locks_lock_name_c'::regclass`)
	goodAndBadCalls(t, db.Connect(t))
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	must(t, migrations.Down(t.Context(), db.Pool, nil))
	sameCatalog(t, catalog(t, db), before)
}

func TestForeignTableIsRefusedAndNamed(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for table, has := range map[string]string{
		"create table distributed_locks (id int primary key, owner text)":                                                                              "id integer, owner text, primary key id",
		"create table distributed_locks (lock_name varchar(255), holder_id varchar(255), acquired_at timestamptz)":                                     "acquired_at timestamp with time zone, holder_id character varying, lock_name character varying",
		"create table distributed_locks ()":                                                                                                            "",
		"create view distributed_locks as select 1 as one":                                                                                             "one integer",
		"create table distributed_locks (lock_name text primary key, holder_id text, acquired_at timestamptz, expires_at timestamptz, metadata jsonb)": "lock_name text",
	} {
		db.Exec(t, table)
		before := catalog(t, db)
		err := refusal(t, migrations.Up(t.Context(), db.Pool, nil), pgerrcode.DuplicateTable)
		if !strings.Contains(err.Message, "public.distributed_locks") || !strings.Contains(err.Message, has) || err.Hint == "" {
			t.Errorf("%s: %v", table, err)
		}
		sameCatalog(t, catalog(t, db), before)
		db.Exec(t, "drop "+strings.Fields(table)[1]+" distributed_locks")
	}
}

// The newest version is taken back first. It has no leases, so it goes, unless
// all files are run in one transaction, or Down asks before the first one.
func TestDownRefusesWhileLeasesAreLive(t *testing.T) {
	t.Parallel()
	db := newSeed(t)
	seed := catalog(t, db)
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			forget(t, db)
			must(t, way.up(t, db.URL))
			want := catalog(t, db)
			expect(t, db.Pool, true, "select acquire_lock('k', 'a', 600)")
			if err := way.down(t, db.URL); err == nil || !strings.Contains(err.Error(), "live leases in schema") {
				t.Errorf("down: %v", err)
			}
			sameCatalog(t, catalog(t, db), want)
			expect(t, db.Pool, false, "select acquire_lock('k', 'b')")
			version(t, db.Pool, newest)
			if strings.HasPrefix(way.name, "psql") {
				must(t, psql(t, as(t, db, "pgxlock.force", "on"), asArguments(downFiles)...))
			} else {
				must(t, migrations.Repair(t.Context(), db.Pool, nil)) // golang-migrate left its mark
				refuse(t, migrations.Down(t.Context(), db.Pool, nil), pgerrcode.ObjectInUse)
				must(t, migrations.Down(t.Context(), db.Pool, &migrations.Config{Force: true}))
			}
			sameCatalog(t, catalog(t, db), seed)
			expect(t, db.Pool, true, "select release_lock('k', 'a')")
		})
	}
}

// Without them what was done once would be done again.
func TestDownRefusesWhileClaimsStand(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	empty := catalog(t, db)
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			for _, claim := range []string{"claim_once('k')", "claim_once('k', null, '1 hour')"} {
				forget(t, db)
				must(t, way.up(t, db.URL))
				want := catalog(t, db)
				expect(t, db.Pool, true, "select "+claim)
				if err := way.down(t, db.URL); err == nil || !strings.Contains(err.Error(), "claims in schema public: 1") {
					t.Errorf("down: %v", err)
				}
				sameCatalog(t, catalog(t, db), want)
				expect(t, db.Pool, false, "select claim_once('k')")
				version(t, db.Pool, newest)
				if strings.HasPrefix(way.name, "psql") {
					must(t, psql(t, as(t, db, "pgxlock.force", "on"), asArguments(downFiles)...))
				} else {
					must(t, migrations.Repair(t.Context(), db.Pool, nil)) // golang-migrate left its mark
					refuse(t, migrations.Down(t.Context(), db.Pool, nil), pgerrcode.ObjectInUse)
					must(t, migrations.Down(t.Context(), db.Pool, &migrations.Config{Force: true}))
				}
				sameCatalog(t, catalog(t, db), empty)
			}
		})
	}
}

func TestDownDoesNotMindClaimsThatHaveEnded(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	expect(t, db.Pool, true, "select claim_once('k', null, '1 microsecond')")
	must(t, migrations.Down(t.Context(), db.Pool, nil))
}

// Their holders could not fence any more. What a dead session left is in nobody's
// way.
func TestDownRefusesWhileASessionHoldsLocksWithTokens(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	empty := catalog(t, db)
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			forget(t, db)
			must(t, way.up(t, db.URL))
			want := catalog(t, db)
			holder := db.Connect(t)
			terminated := fmt.Sprintf("select count(pg_terminate_backend(pid, 60000)) >= 0 from pg_stat_activity where pid = %d", holder.PgConn().PID())
			expect(t, holder, true, "select pgxlock_advisory_batch('{0,1}', '{1,2}', 7) is not null")
			if err := way.down(t, db.URL); err == nil || !strings.Contains(err.Error(), "advisory locks with tokens in schema public: 2") {
				t.Errorf("down: %v", err)
			}
			sameCatalog(t, catalog(t, db), want)
			version(t, db.Pool, newest)
			if strings.HasPrefix(way.name, "psql") {
				must(t, psql(t, as(t, db, "pgxlock.force", "on"), asArguments(downFiles)...))
			} else {
				must(t, migrations.Repair(t.Context(), db.Pool, nil)) // golang-migrate left its mark
				expect(t, db.Pool, true, terminated)
				must(t, migrations.Down(t.Context(), db.Pool, nil))
			}
			sameCatalog(t, catalog(t, db), empty)
			_ = holder.Close(t.Context())
			expect(t, db.Pool, true, terminated) // or the next one may find the number of its session in use
		})
	}
}

// Whether an open transaction's claim will stand is not known yet.
func TestDownDoesNotOvertakeAnOpenClaim(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := atVersion(t, 2)
	before := catalog(t, db)
	url := as(t, db, "idle_in_transaction_session_timeout", "60s") // so that a broken file does not wait for ever
	claimant, err := pgtest.Connect(t, url).Begin(t.Context())
	must(t, err)
	expect(t, claimant, true, "select claim_once('k')")
	refuse(t, migrations.Down(t.Context(), db.Pool, nil), pgerrcode.LockNotAvailable)
	sameCatalog(t, catalog(t, db), before)
	must(t, claimant.Commit(t.Context()))
	refuse(t, migrations.Down(t.Context(), db.Pool, nil), pgerrcode.ObjectInUse)
	expect(t, db.Pool, false, "select claim_once('k')")
}

// A down file waits for open transactions, and callers wait for it: not where it is refused anyway.
func TestDownRefusesWithoutWaitingForOpenTransactions(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := atVersion(t, newest)
	claimant, err := db.Connect(t).Begin(t.Context())
	must(t, err)
	expect(t, claimant, true, "select claim_once('k')")
	expect(t, db.Pool, true, "select acquire_lock('k', 'a', 600)")
	refuse(t, migrations.Down(t.Context(), db.Pool, nil), pgerrcode.ObjectInUse)
	must(t, claimant.Rollback(t.Context()))
}

// Everything of the version before stays as it is, leases and plans included, on
// the way up and on the way back.
func TestLeasesAndSessionsOutliveTheNewestVersion(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			db := atVersion(t, 1)
			conn := db.Connect(t)
			for name, query := range map[string]string{
				"acquire": "select acquire_lock($1, $2, 600)", "renew": "select renew_lock('held', 'a', $1) is not null",
				"fence": "select assert_lock_held('held', 'a', $1)", "release": "select release_lock($1, $2)",
			} {
				_, err := conn.Prepare(t.Context(), name, query)
				must(t, err)
			}
			expect(t, conn, true, "acquire", "held", "a")
			token := ask[int64](t, conn, "select fencing_token from distributed_locks")
			calls := func() {
				t.Helper()
				for range 6 { // more than the five after which a plan is kept
					expect(t, conn, false, "acquire", "held", "b")
					expect(t, conn, true, "renew", token)
					expect(t, conn, token, "fence", token)
					expect(t, conn, true, "acquire", "k", "a")
					expect(t, conn, true, "release", "k", "a")
				}
			}
			calls()
			fenced, err := db.Connect(t).Begin(t.Context()) // an open transaction is not in the way
			must(t, err)
			expect(t, fenced, token, "select assert_lock_held('held', 'a')")
			must(t, way.up(t, db.URL))
			must(t, fenced.Commit(t.Context()))
			version(t, db.Pool, newest)
			calls()
			callsInTransactions(t, conn)
			db.Exec(t, "delete from pgxlock_claims")
			must(t, psql(t, as(t, db, "pgxlock.force", "on"), "-f", downFiles[0])) // which leaves the leases where they are
			version(t, db.Pool, newest-1)
			calls()
			must(t, migrations.Up(t.Context(), db.Pool, nil))
			calls()
			callsInTransactions(t, conn)
			expect(t, conn, true, "release", "held", "a")
		})
	}
}

// An upgrade that queued for the table would stop every caller behind it.
func TestReaderOfTheTableStopsTheUpgradeNotTheCallers(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := newSeed(t)
	before := catalog(t, db)
	url := as(t, db, "idle_in_transaction_session_timeout", "60s") // so that a broken upgrade does not wait for ever
	reader, err := pgtest.Connect(t, url).Begin(t.Context())
	must(t, err)
	expect(t, reader, 0, "select count(*) from distributed_locks")
	refuse(t, migrations.Up(t.Context(), db.Pool, nil), pgerrcode.LockNotAvailable)
	sameCatalog(t, catalog(t, db), before)
	version(t, db.Pool, 0)
	expect(t, db.Pool, true, "select acquire_lock('k', 'a')")
	must(t, reader.Rollback(t.Context()))
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	expect(t, db.Pool, false, "select acquire_lock('k', 'b')")
}

func TestUpgradeUnderTrafficFailsNoCallAndGrantsNothingTwice(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for round := range 3 {
		t.Run(fmt.Sprint("from the seed ", round), func(t *testing.T) { upgradeUnderTraffic(t, newSeed(t)) })
	}
	for round := range 2 {
		t.Run(fmt.Sprint("from the version before ", round), func(t *testing.T) { upgradeUnderTraffic(t, atVersion(t, newest-1)) })
	}
}

func upgradeUnderTraffic(t *testing.T, db *pgtest.DB) {
	var (
		held  [2]atomic.Int32
		pairs atomic.Int64
		stop  = make(chan struct{})
		wg    sync.WaitGroup
	)
	for worker := range 6 {
		conn, holder := db.Connect(t), fmt.Sprint("worker ", worker)
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				n := i % len(held)
				name := fmt.Sprint("lock ", n)
				got, err := call(t, conn, "select acquire_lock($1, $2, $3)", name, holder, 600)
				if err != nil {
					t.Errorf("acquire: %v", err)
					return
				}
				if !got {
					continue
				}
				if now := held[n].Add(1); now != 1 {
					t.Errorf("%s has %d holders", name, now)
				}
				held[n].Add(-1)
				if got, err = call(t, conn, "select release_lock($1, $2)", name, holder); err != nil || !got {
					t.Errorf("release: %t, %v", got, err)
					return
				}
				pairs.Add(1)
			}
		})
	}
	more := func() { // waits for some traffic
		from := pairs.Load()
		pgtest.Until(t, "twenty more pairs", func() bool { return pairs.Load() >= from+20 || t.Failed() })
	}
	more()
	err := migrations.Up(t.Context(), db.Pool, nil)
	for again := 0; again < 5 && lockTimeout(err); again++ { // a busy machine may let somebody stand still with the table
		err = migrations.Up(t.Context(), db.Pool, nil)
	}
	must(t, err)
	more()
	close(stop)
	wg.Wait()
	expect(t, db.Pool, 0, "select count(*) from distributed_locks")
}

// call repeats what another session made it impossible to do in time.
func call(t *testing.T, conn *pgx.Conn, query string, args ...any) (got bool, err error) {
	for {
		err = conn.QueryRow(t.Context(), query, args...).Scan(&got)
		if !lockTimeout(err) {
			return got, err
		}
	}
}

// What is shared could not be renewed or given back any more.
func TestDownRefusesWhileLeasesAreShared(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := atVersion(t, 5)
	expect(t, db.Pool, true, "select acquire_shared_lock('k', 'A', 600)")
	before := catalog(t, db)
	err := psql(t, db.URL, "-f", downFiles[newest-5])
	if err == nil || !strings.Contains(err.Error(), "live shares of leases in schema public: 1") {
		t.Errorf("down: %v", err)
	}
	sameCatalog(t, catalog(t, db), before)
	must(t, psql(t, as(t, db, "pgxlock.force", "on"), "-f", downFiles[newest-5]))
	version(t, db.Pool, 4)
	expect(t, db.Pool, false, "select acquire_lock('k', 'W')") // it runs out, as any other
	must(t, psql(t, db.URL, "-f", upFiles[4]))
	expect(t, db.Pool, false, "select acquire_shared_lock('k', 'B', 1)") // of whom nobody would know that A is there
	must(t, psql(t, as(t, db, "pgxlock.force", "on"), "-f", downFiles[newest-5]))
	db.Exec(t, "update distributed_locks set expires_at = clock_timestamp()")
	expect(t, db.Pool, true, "select acquire_lock('k', 'W')")
	must(t, psql(t, db.URL, "-f", upFiles[4]))
	expect(t, db.Pool, false, "select acquire_shared_lock('k', 'A')")
	sameCatalog(t, catalog(t, db), before)

	expect(t, db.Pool, true, "select release_lock('k', 'W') and acquire_shared_lock('k', 'A')")
	db.Exec(t, "update distributed_lock_shares set expires_at = clock_timestamp(); update distributed_locks set expires_at = clock_timestamp()") // nobody is there any more
	must(t, psql(t, db.URL, "-f", downFiles[newest-5]))
}
