package systemtest_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// Programs that log in as roles with few rights.

// login makes a role that can log in, and returns the database as it sees it.
func login(t *testing.T, db *pgtest.DB) (role string, theirs *pgtest.DB) {
	t.Helper()
	role, password := "pgxlock_test_"+strings.ToLower(rand.Text()), rand.Text()
	db.Exec(t, fmt.Sprintf("create role %s login password '%s'", role, password))
	t.Cleanup(func() {
		if _, err := db.Pool.Exec(context.Background(), "drop owned by "+role+" cascade; drop role "+role); err != nil {
			t.Error(err)
		}
	})
	pool := db.NewPool(t, func(c *pgxpool.Config) { c.ConnConfig.User, c.ConnConfig.Password = role, password })
	return role, &pgtest.DB{Pool: pool, URL: db.URL, Name: db.Name}
}

// denied checks that the server refused, because a right is missing.
func denied(t *testing.T, err error) {
	t.Helper()
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || pgErr.Code != pgerrcode.InsufficientPrivilege || errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("%v, want SQLSTATE 42501", err)
	}
}

// works uses all that a program needs of a Locker and of transactions.
func works(t *testing.T, db *pgtest.DB) {
	t.Helper()
	locks, others := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Renew: 100 * time.Millisecond}), testkit.NewLocker(t, db, nil)
	lock := testkit.Acquire(t, locks, "k")
	_, err := others.TryAcquire(t.Context(), "k")
	if busy, ok := errors.AsType[*pgxlock.Error](err); !ok || busy.Holder != lock.Holder() {
		t.Errorf("a held lease: %v", err)
	}
	holders, err := others.Holders(t.Context(), "k")
	if err != nil || len(holders) != 1 || holders[0].ID != lock.Holder() || holders[0].Token != lock.Token() {
		t.Errorf("holders: %v, %v", holders, err)
	}
	expires := holders[0].Expires
	pgtest.Until(t, "it renews itself", func() bool {
		holders, err := others.Holders(t.Context(), "k")
		return err == nil && len(holders) == 1 && holders[0].Expires.After(expires)
	})
	useLock(t, locks, db.Pool, "other") // Acquire, Renew, Fence, Release
	if err := lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
	many, err := locks.AcquireAll(t.Context(), []string{"a", "b", "c"})
	if err != nil {
		t.Fatal(err)
	}
	if err := many.Release(t.Context()); err != nil {
		t.Error(err)
	}
	tx := testkit.Begin(t, db, pgx.TxOptions{})
	if err := pgxlock.LockTx(t.Context(), tx, "k", testkit.LongWait); err != nil {
		t.Error(err)
	}
	if first, err := pgxlock.ClaimTx(t.Context(), tx, "k "+rand.Text()); err != nil || !first {
		t.Errorf("claim: %t, %v", first, err)
	}
	testkit.Commit(t, tx)
	allows(t, newLimiter(t, db, hourly, 2), rand.Text(), 1, true, true, false)
}

func TestLockerWorksForAHardenedApplicationAndCannotForge(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	role, app := login(t, db)
	db.Exec(t, "select harden_locks(), grant_locks('"+role+"', 'application')")
	works(t, app)

	lock := testkit.Acquire(t, testkit.NewLocker(t, db, nil), "theirs")
	for _, sql := range []string{
		"update distributed_locks set holder_id = 'forged', expires_at = 'infinity'", "delete from distributed_locks",
		"insert into distributed_locks (lock_name, holder_id, expires_at) values ('mine', 'forged', 'infinity')",
		"select * from distributed_locks", "delete from pgxlock_claims", "select purge_claims('0')", "select soften_locks()",
	} {
		_, err := app.Pool.Exec(t.Context(), sql)
		denied(t, err)
	}
	if err := lock.Renew(t.Context()); err != nil {
		t.Error(err)
	}
	_, err := pgxlock.PurgeClaims(t.Context(), app.Pool, 0)
	denied(t, err)
	if !strings.Contains(err.Error(), "docs/rights.md") {
		t.Errorf("the message does not say where rights are named: %v", err)
	}
}

// A Locker's housekeeping is this statement, run every ten minutes or so.
func TestHousekeepingRunsForAHardenedApplication(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	role, app := login(t, db)
	db.Exec(t, "select harden_locks(), grant_locks('"+role+"', 'application')")
	db.Exec(t, "select acquire_lock('old', 'gone'), acquire_lock('live', 'here')")
	db.Exec(t, "update distributed_locks set expires_at = now() - interval '1 day' where lock_name = 'old'")
	reap, err := os.ReadFile("../../sql/lease/reap.sql")
	if err != nil {
		t.Fatal(err)
	}
	app.Exec(t, string(reap), 3600, 256)
	if left := testkit.Query[string](t, db, "select string_agg(lock_name, ' ') from distributed_locks"); left != "live" {
		t.Errorf("left: %s", left)
	}
}

// adoptSeed installs the seed, with rights of a role, and the migrations over it.
func adoptSeed(t *testing.T, db *pgtest.DB, role string) {
	t.Helper()
	seed, err := os.ReadFile("../../testdata/seed.sql")
	if err != nil {
		t.Fatal(err)
	}
	db.Exec(t, string(seed))
	db.Exec(t, "grant select, insert, update, delete on distributed_locks to "+role)
	install(t, db, "")
}

func TestSeedsRightsAndThoseThatAreGrantedAreEnoughWithoutHardening(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	role, app := login(t, db)
	adoptSeed(t, db, role)
	useLock(t, testkit.NewLocker(t, app, nil), app.Pool, "seed") // claims are newer than the seed
	role, app = login(t, db)
	db.Exec(t, "select grant_locks('"+role+"', 'application')")
	works(t, app)
	db.Exec(t, "select revoke_locks('"+role+"')")
	_, err := testkit.NewLocker(t, app, nil).TryAcquire(t.Context(), "k")
	denied(t, err)
}

func TestMonitoringSeesAndAdministrationEndsWhatOthersHold(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	monitor, looks := login(t, db)
	admin, acts := login(t, db)
	db.Exec(t, "select harden_locks(), grant_locks('"+monitor+"', 'monitoring'), grant_locks('"+admin+"', 'administration')")
	lock := testkit.Acquire(t, testkit.NewLocker(t, db, nil), "k")
	db.Exec(t, "select claim_once('done')")
	for _, theirs := range []*pgtest.DB{looks, acts} {
		locks := testkit.NewLocker(t, theirs, nil)
		if holders, err := locks.Holders(t.Context(), "k"); err != nil || len(holders) != 1 || holders[0].ID != lock.Holder() {
			t.Errorf("%v, %v", holders, err)
		}
		if got := testkit.Query[string](t, theirs, "select concat_ws(' ', l.holder_id, c.claim_key) from lock_leases l, pgxlock_claims c"); got != lock.Holder()+" done" {
			t.Errorf("it sees %q", got)
		}
		_, err := locks.TryAcquire(t.Context(), "free")
		denied(t, err)
		_, err = theirs.Pool.Exec(t.Context(), "update distributed_locks set expires_at = now()")
		denied(t, err)
	}
	_, err := pgxlock.PurgeClaims(t.Context(), looks.Pool, 0)
	denied(t, err)
	if n, err := pgxlock.PurgeClaims(t.Context(), acts.Pool, 0); n != 1 || err != nil {
		t.Errorf("purged %d, %v", n, err)
	}
	_, err = looks.Pool.Exec(t.Context(), "select release_lock($1, $2)", "k", lock.Holder())
	denied(t, err)
	if !testkit.Query[bool](t, acts, "select release_lock($1, $2)", "k", lock.Holder()) {
		t.Error("administration cannot release")
	}
	if err := lock.Renew(t.Context()); !errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("after the eviction: %v", err)
	}
}

// Somebody switched it on for a role that is not the owner.
func TestRowLevelSecurityIsAnErrorThatNamesTheRemedy(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	role, app := login(t, db)
	db.Exec(t, "grant select, insert, update, delete on distributed_locks, pgxlock_claims, pgxlock_waiters, pgxlock_limits to "+role)
	locks := testkit.NewLocker(t, app, nil)
	lock := testkit.Acquire(t, locks, "held")
	db.Exec(t, `alter table distributed_locks enable row level security; alter table pgxlock_claims enable row level security;
		create policy most on distributed_locks using (lock_name <> 'held'); create policy most on pgxlock_claims using (claim_key <> 'held')`)
	tx := testkit.Begin(t, app, pgx.TxOptions{})
	_, claim := pgxlock.ClaimTx(t.Context(), tx, "held")
	testkit.Rollback(t, tx)
	tx = testkit.Begin(t, app, pgx.TxOptions{})
	fence := lock.Fence(t.Context(), tx)
	testkit.Rollback(t, tx)
	_, try := locks.TryAcquire(t.Context(), "free")
	_, holders := locks.Holders(t.Context(), "held")
	for name, err := range map[string]error{"try": try, "renew": lock.Renew(t.Context()), "fence": fence, "holders": holders, "claim": claim, "release": lock.Release(t.Context())} {
		denied(t, err)
		if err == nil || !strings.Contains(err.Error(), "DISABLE ROW LEVEL SECURITY") {
			t.Errorf("%s: %v", name, err)
		}
	}
	db.Exec(t, "select harden_locks(), grant_locks('"+role+"', 'application')") // then it does not matter
	useLock(t, locks, app.Pool, "free")
}

// The SQL of docs/rights.md is run as it stands, with roles of other names.
func TestRightsInTheDocumentationAreEnough(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	text, err := os.ReadFile("../../docs/rights.md")
	if err != nil {
		t.Fatal(err)
	}
	snippets := regexp.MustCompile("(?ms)^```sql\n(.*?)^```").FindAllStringSubmatch(string(text), -1)
	if len(snippets) != 2 {
		t.Fatalf("%d snippets", len(snippets))
	}
	for _, snippet := range snippets {
		db := pgtest.New(t)
		install(t, db, "locks")
		var app *pgtest.DB
		sql := snippet[1]
		for _, name := range []string{"app", "metrics", "ops"} {
			role, theirs := login(t, db)
			db.Exec(t, "alter role "+role+" in database "+db.Name+" set search_path = locks")
			sql = regexp.MustCompile(`\b`+name+`\b`).ReplaceAllString(sql, role)
			if name == "app" {
				app = theirs
			}
		}
		db.Exec(t, sql)
		works(t, app)
	}
}
