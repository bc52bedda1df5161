package systemtest_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
	"github.com/pgxlock/pgxlock/monitor"
)

func TestMonitorShowsLeasesSharesAndPermits(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "worker"})
	exclusive := testkit.Acquire(t, locks, "order:1", pgxlock.Metadata("pod-7"))
	shared := testkit.Acquire(t, locks, "order:2", pgxlock.Shared)
	slot := testkit.Permit(t, testkit.Semaphore(t, locks, 3), "jobs")
	db.Exec(t, `select acquire_lock('order:3', 'forever'); update distributed_locks set acquired_at = '-infinity', expires_at = 'infinity' where lock_name = 'order:3';
		select acquire_lock('late', 'died'), acquire_lock('gone', 'died long ago'), acquire_lock('ahead', 'of its time');
		update distributed_locks set acquired_at = clock_timestamp() + interval '1 hour' where lock_name = 'ahead';
		update distributed_locks set expires_at = clock_timestamp() - interval '1 minute' where lock_name = 'late';
		update distributed_locks set expires_at = clock_timestamp() - interval '2 hours' where lock_name = 'gone'`)
	mon := testkit.NewMonitor(t, db, nil)
	shot := testkit.Snapshot(t, mon)
	if len(shot.Missing) > 0 || shot.At.IsZero() {
		t.Errorf("missing: %q, at %v", shot.Missing, shot.At)
	}
	for _, lock := range []*pgxlock.Lock{exclusive, shared, slot} {
		found := testkit.HoldersOf(shot, lock.Key())
		if len(found) != 1 || found[0].ID != lock.Holder() || found[0].Token != lock.Token() || found[0].Kind != pgxlock.KindLease || found[0].State != pgxlock.StateLive || found[0].Suspect {
			t.Errorf("%s: %+v", lock.Key(), found)
		}
		if len(found) == 1 && (found[0].Since.IsZero() || !found[0].Expires.After(found[0].Since)) {
			t.Errorf("%s: from %v to %v", lock.Key(), found[0].Since, found[0].Expires)
		}
	}
	if h := testkit.HoldersOf(shot, "order:1"); h[0].Metadata != "pod-7" || h[0].Mode != pgxlock.Exclusive {
		t.Errorf("%+v", h)
	}
	if h := testkit.HoldersOf(shot, "order:2"); h[0].Mode != pgxlock.Shared {
		t.Errorf("%+v", h)
	}
	if h := testkit.HoldersOf(shot, "order:3"); len(h) != 1 || !h[0].Since.IsZero() || !h[0].Expires.IsZero() {
		t.Errorf("%+v", h)
	}
	if h := testkit.HoldersOf(shot, "ahead"); len(h) != 1 || !h[0].Suspect {
		t.Errorf("%+v", h)
	}
	states := func(holders []pgxlock.Holder) (text []string) {
		for _, h := range holders {
			text = append(text, h.Key+" "+string(h.State))
		}
		return text
	}
	want := []string{"gone abandoned", "late expired"}
	if got := states(shot.Expired); !slices.Equal(got, want) {
		t.Errorf("expired: %q", got)
	}
	expired, err := mon.Expired(t.Context())
	if got := states(expired); err != nil || !slices.Equal(got, want) {
		t.Errorf("Expired: %q, %v", got, err)
	}
	for _, test := range []struct {
		filter monitor.Filter
		want   []string
	}{
		{monitor.Filter{Prefix: "order:"}, []string{"order:1 live", "order:2 live", "order:3 live"}},
		{monitor.Filter{Kind: pgxlock.KindLease, Key: "order:2"}, []string{"order:2 live"}},
		{monitor.Filter{Kind: pgxlock.KindLease, Key: "order:"}, nil},
		{monitor.Filter{Kind: pgxlock.KindLease, Prefix: "late"}, nil},
		{monitor.Filter{Kind: pgxlock.KindAdvisory, Prefix: "order:"}, nil},
	} {
		found, err := mon.Holders(t.Context(), test.filter)
		if got := states(found); err != nil || !slices.Equal(got, test.want) {
			t.Errorf("%+v: %q, %v", test.filter, got, err)
		}
	}
}

func TestMonitorShowsAdvisoryLocksWithTheirNames(t *testing.T) {
	t.Parallel()
	db, elsewhere := pgtest.New(t), pgtest.New(t) // nothing needs to be installed
	locks := testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: "worker"})
	named, raw := testkit.Acquire(t, locks, "order:1", pgxlock.Shared), testkit.Acquire(t, locks, pgxlock.RawKey2(-1, 7))
	conn, pid := testkit.Backend(t, db)
	testkit.ExecOn(t, conn, fmt.Sprintf("set application_name = 'psql'; begin; select pg_advisory_xact_lock(%d), pg_advisory_lock_shared(-42)", pgxlock.AdvisoryID("in a transaction")))
	other, _ := testkit.Backend(t, elsewhere)
	testkit.ExecOn(t, other, "select pg_advisory_lock(4711)")

	mon := testkit.NewMonitor(t, db, &monitor.Config{Names: []string{"order:1", "in a transaction", "nobody's"}})
	shot := testkit.Snapshot(t, mon)
	for _, want := range []pgxlock.Holder{
		{Key: "order:1", Mode: pgxlock.Shared, ID: named.Holder(), Application: "pgxlock worker"},
		{Key: "#-1,7", Raw: true, ID: raw.Holder(), Application: "pgxlock worker"},
		{Key: "in a transaction", ID: fmt.Sprintf("psql:%d", pid), PID: pid, Application: "psql"},
		{Key: "#-42", Raw: true, Mode: pgxlock.Shared, ID: fmt.Sprintf("psql:%d", pid), PID: pid, Application: "psql"},
	} {
		found := testkit.HoldersOf(shot, want.LockKey())
		if len(found) != 1 {
			t.Errorf("%q: %+v", want.Key, found)
			continue
		}
		want.Kind, want.State, want.Role, want.Client = pgxlock.KindAdvisory, pgxlock.StateLive, found[0].Role, found[0].Client
		if want.PID == 0 {
			want.PID = found[0].PID
		}
		if found[0] != want || want.Role == "" || !strings.HasSuffix(want.ID, fmt.Sprint(":", want.PID)) {
			t.Errorf("%+v, want %+v", found[0], want)
		}
	}
	if found := testkit.HoldersOf(shot, pgxlock.RawKey(4711)); found != nil {
		t.Errorf("of another database: %+v", found)
	}
	if load := shot.Load; load.Locks < 5 || load.Room < load.Locks || load.Notifications < 0 || load.Notifications > 1 {
		t.Errorf("%+v", load)
	}
	if len(shot.Missing) != 1 || !strings.Contains(shot.Missing[0], "leases, and the queues of waiters: schema missing or out of date") {
		t.Errorf("missing: %q", shot.Missing)
	}
	if own, err := locks.Holders(t.Context(), pgxlock.RawKey2(-1, 7)); err != nil || len(own) != 1 || own[0].Key != "#-1,7" || !own[0].Raw || own[0].LockKey() != raw.Key() {
		t.Errorf("the Locker says: %+v, %v", own, err)
	}
	for filter, n := range map[monitor.Filter]int{{Prefix: "order:"}: 1, {Key: pgxlock.RawKey2(-1, 7)}: 1, {Key: "order:1"}: 1, {Key: "order:2"}: 0} {
		filter.Kind = pgxlock.KindAdvisory
		if found, err := mon.Holders(t.Context(), filter); err != nil || len(found) != n {
			t.Errorf("%+v: %+v, %v", filter, found, err)
		}
	}
	// A name that is asked for is known.
	if found, err := testkit.NewMonitor(t, db, nil).Holders(t.Context(), monitor.Filter{Kind: pgxlock.KindAdvisory, Key: "in a transaction"}); err != nil || len(found) != 1 {
		t.Errorf("%+v, %v", found, err)
	}
	// A kind that was asked for and cannot be seen is an error, so that no caller takes a part for all.
	for _, kind := range []pgxlock.Kind{0, pgxlock.KindLease} {
		_, err := mon.Holders(t.Context(), monitor.Filter{Kind: kind, Key: "order:1"})
		wantSchemaError(t, err)
		_, err = mon.Waiters(t.Context(), monitor.Filter{Kind: kind})
		wantSchemaError(t, err)
	}
	_, err := mon.Expired(t.Context())
	wantSchemaError(t, err)
	if waiters, err := mon.Waiters(t.Context(), monitor.Filter{Kind: pgxlock.KindAdvisory}); len(waiters) > 0 || err != nil {
		t.Errorf("%+v, %v", waiters, err)
	}
}

// A prepared transaction has no session, and keeps its locks.
func TestMonitorShowsLocksOfPreparedTransactions(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{Settings: map[string]string{"max_prepared_transactions": "2"}})
	url := server.URL("postgres")
	db := &pgtest.DB{Pool: pgtest.Pool(t, url), URL: url, Name: "postgres"}
	conn, _ := testkit.Backend(t, db)
	testkit.ExecOn(t, conn, "begin; select pg_advisory_xact_lock(1); prepare transaction 'p'")
	waiter, pid := testkit.Backend(t, db)
	waits := make(chan error, 1)
	go func() {
		_, err := waiter.PgConn().Exec(t.Context(), "select pg_advisory_lock(1)").ReadAll()
		waits <- err
	}()
	mon := testkit.NewMonitor(t, db, nil)
	pgtest.Until(t, "it waits", func() bool { return len(testkit.Snapshot(t, mon).Waiters) == 1 })
	shot := testkit.Snapshot(t, mon)
	if h := shot.Holders; len(h) != 1 || h[0].PID != 0 || h[0].ID != "prepared transaction" {
		t.Fatalf("%+v", h)
	}
	if w := shot.Waiters[0]; w.PID != pid || !slices.Equal(w.BlockedBy, []int32{0}) {
		t.Errorf("%+v", w)
	}
	if _, err := mon.Evict(t.Context(), shot.Holders[0], "why"); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("it is evicted: %v", err)
	}
	db.Exec(t, "rollback prepared 'p'")
	if err := <-waits; err != nil {
		t.Error(err)
	}
}

func TestMonitorShowsOnAnOlderSchemaTheAdvisoryLocksAndWhatToRun(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	version := newest(t)
	db := onVersion(t, version-1)
	db.Exec(t, "select acquire_lock('k', 'A')")
	lock := testkit.Acquire(t, testkit.NewAdvisory(t, db, nil), "advisory")
	mon := testkit.NewMonitor(t, db, &monitor.Config{Names: []string{"advisory"}})
	shot := testkit.Snapshot(t, mon)
	held := testkit.HoldersOf(shot, lock.Key())
	if len(held) != 1 {
		t.Fatalf("%+v", shot.Holders)
	}
	want := fmt.Sprintf(`schema "public" has version %d, version %d is needed`, version-1, version)
	if missing := strings.Join(shot.Missing, "\n"); !strings.Contains(missing, "leases, and the queues of waiters") || !strings.Contains(missing, want) || !strings.Contains(missing, "pgxlock migrate up") {
		t.Errorf("missing: %q", missing)
	}
	for _, kind := range []pgxlock.Kind{0, pgxlock.KindLease} {
		_, err := mon.Holders(t.Context(), monitor.Filter{Kind: kind})
		wantSchemaError(t, err, want)
		_, err = mon.Waiters(t.Context(), monitor.Filter{Kind: kind})
		wantSchemaError(t, err, want)
	}
	if found, err := mon.Holders(t.Context(), monitor.Filter{Kind: pgxlock.KindAdvisory, Key: lock.Key()}); len(found) != 1 || err != nil {
		t.Errorf("%+v, %v", found, err)
	}
	if _, err := mon.Waiters(t.Context(), monitor.Filter{Kind: pgxlock.KindAdvisory}); err != nil {
		t.Error(err)
	}
	_, err := mon.Evict(t.Context(), held[0], "why")
	wantSchemaError(t, err, want)
}

func TestMonitorWorksOnTheNextSchema(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := onVersion(t, newest(t)+1)
	db.Exec(t, "select acquire_lock('k', 'A'), acquire_lock('old', 'B'); update distributed_locks set expires_at = now() where lock_name = 'old'")
	mon := testkit.NewMonitor(t, db, nil)
	shot := testkit.Snapshot(t, mon)
	if len(shot.Expired) != 1 || len(testkit.HoldersOf(shot, "k")) != 1 || len(shot.Missing) > 0 {
		t.Errorf("%+v", shot)
	}
	if _, err := mon.Waiters(t.Context(), monitor.Filter{}); err != nil {
		t.Error(err)
	}
	if n, err := mon.Reap(t.Context(), 0); n != 1 || err != nil {
		t.Errorf("reaped %d, %v", n, err)
	}
	if evicted, err := mon.Evict(t.Context(), testkit.HoldersOf(shot, "k")[0], "why"); err != nil || !evicted {
		t.Errorf("evicted: %t, %v", evicted, err)
	}
}

func TestRoleIsToldWhatItMayNotSee(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	db.Exec(t, "select acquire_lock('k', 'A')")
	conn, _ := testkit.Backend(t, db)
	testkit.ExecOn(t, conn, "select pg_advisory_lock(7)")
	role, theirs := login(t, db)
	mon := testkit.NewMonitor(t, theirs, nil)
	wantMissing := func(shot monitor.Snapshot, want ...string) {
		t.Helper()
		for i, part := range want {
			if len(shot.Missing) != len(want) || !strings.HasPrefix(shot.Missing[i], part) {
				t.Fatalf("missing %q, want %q", shot.Missing, want)
			}
		}
		if len(testkit.HoldersOf(shot, pgxlock.RawKey(7))) != 1 {
			t.Errorf("%+v", shot.Holders)
		}
	}
	wantMissing(testkit.Snapshot(t, mon), "leases, names behind the numbers of advisory locks, the queues of waiters, why holders were evicted: ", "addresses and transactions")
	for _, filter := range []monitor.Filter{{}, {Key: "k"}, {Kind: pgxlock.KindLease}} {
		_, err := mon.Holders(t.Context(), filter)
		denied(t, err)
	}
	for _, kind := range []pgxlock.Kind{0, pgxlock.KindLease, pgxlock.KindAdvisory} { // which wait in queues as well
		_, err := mon.Waiters(t.Context(), monitor.Filter{Kind: kind})
		denied(t, err)
	}
	if found, err := mon.Holders(t.Context(), monitor.Filter{Kind: pgxlock.KindAdvisory}); len(found) != 1 || err != nil {
		t.Errorf("%+v, %v", found, err)
	}
	db.Exec(t, "revoke usage on schema public from public")
	for _, kind := range []pgxlock.Kind{0, pgxlock.KindLease, pgxlock.KindAdvisory} {
		_, err := testkit.NewMonitor(t, theirs, &monitor.Config{Schema: "public"}).Waiters(t.Context(), monitor.Filter{Kind: kind})
		denied(t, err)
	}
	db.Exec(t, "grant usage on schema public to public")
	for _, hardened := range []bool{false, true} {
		if hardened {
			db.Exec(t, "select harden_locks()")
		}
		db.Exec(t, fmt.Sprintf("select grant_locks('%s', 'monitoring')", role))
		shot := testkit.Snapshot(t, mon)
		wantMissing(shot, "addresses and transactions")
		if !strings.Contains(shot.Missing[0], "GRANT pg_monitor") || len(testkit.HoldersOf(shot, "k")) != 1 {
			t.Errorf("%+v", shot)
		}
		_, err := mon.Evict(t.Context(), testkit.HoldersOf(shot, "k")[0], "why")
		denied(t, err)
	}
	testkit.ExecOn(t, conn, "select pg_advisory_unlock(7)")
	if shot := testkit.Snapshot(t, mon); len(shot.Missing) != 1 || !strings.HasPrefix(shot.Missing[0], "transactions of other roles' sessions") {
		t.Errorf("without an advisory lock: missing %q", shot.Missing)
	}
	db.Exec(t, "grant pg_monitor to "+role)
	shot := testkit.Snapshot(t, mon)
	if len(shot.Missing) > 0 {
		t.Errorf("missing: %q", shot.Missing)
	}
	db.Exec(t, fmt.Sprintf("select grant_locks('%s', 'administration')", role))
	if evicted, err := mon.Evict(t.Context(), testkit.HoldersOf(shot, "k")[0], "why"); err != nil || !evicted {
		t.Errorf("%t, %v", evicted, err)
	}
}

// What pgxlock locks for itself is no hold: nobody is listed with it, and nobody can be
// evicted from it.
func TestMonitorShowsPgxlocksOwnLocksOnlyIfAsked(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	leases, advisory := testkit.NewLocker(t, db, nil), testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Tokens: true})
	lease, session := testkit.Acquire(t, leases, "lease"), testkit.Acquire(t, advisory, "session")
	next := testkit.Waits(t, testkit.NewLocker(t, db, nil), "lease", testkit.LongWait)
	testkit.UntilQueued(t, db, "lease", 1)
	tx := testkit.Begin(t, db, pgx.TxOptions{})
	for _, lock := range []*pgxlock.Lock{lease, session} {
		if err := lock.Fence(t.Context(), tx); err != nil {
			t.Fatal(err)
		}
	}
	open := testkit.Begin(t, db, pgx.TxOptions{})
	if _, err := open.Exec(t.Context(), "select acquire_lock('open', 'A')"); err != nil {
		t.Fatal(err)
	}

	mon := testkit.NewMonitor(t, db, &monitor.Config{Names: []string{"session"}})
	internal := testkit.NewMonitor(t, db, &monitor.Config{Names: []string{"session"}, Internal: true})
	keys := func(holders []pgxlock.Holder) (keys []string) {
		for _, h := range holders {
			if h.Internal {
				t.Errorf("it is not asked for: %v", h)
			}
			keys = append(keys, h.Key)
		}
		return keys
	}
	want := []string{"session", "lease"}
	if got := keys(testkit.Snapshot(t, mon).Holders); !slices.Equal(got, want) {
		t.Errorf("the holders of a snapshot have %q", got)
	}
	found, err := mon.Holders(t.Context(), monitor.Filter{})
	if got := keys(found); err != nil || !slices.Equal(got, want) {
		t.Errorf("the holders have %q, %v", got, err)
	}
	of, err := mon.Session(t.Context(), int32(testkit.Query[int64](t, db, "select pid from lock_holders where key_id = $1", pgxlock.AdvisoryID("session"))))
	if got := keys(of.Holders); err != nil || !slices.Equal(got, want[:1]) {
		t.Errorf("the session has %q, %v", got, err)
	}

	// The same as the server knows of, each with what it is.
	in := testkit.Query[int](t, db, `select count(*) from pg_locks where locktype = 'advisory' and pgxlock_is_own_key(objsubid, classid::bigint << 32 | objid::bigint)
		and database = (select oid from pg_database where datname = current_database())`)
	found, err = mon.Holders(t.Context(), monitor.Filter{Kind: pgxlock.KindAdvisory, Internal: true})
	if err != nil {
		t.Fatal(err)
	}
	shown, labels := 0, make(map[string]int)
	for _, h := range found {
		if !h.Internal {
			continue
		}
		shown++
		labels[h.Label]++
		if named, err := mon.Holders(t.Context(), monitor.Filter{Kind: pgxlock.KindAdvisory, Key: h.LockKey()}); err != nil || len(named) != 1 || !named[0].Internal {
			t.Errorf("asked for by its number: %v, %v", named, err)
		}
		evicted, err := mon.Evict(t.Context(), h, "why")
		if evicted || !errors.Is(err, monitor.ErrInternalLock) || !strings.Contains(err.Error(), h.Label) {
			t.Errorf("evicted %t: %v", evicted, err)
		}
	}
	if shown != in || labels["pgxlock: pin of a fenced transaction"] != 2 || labels["pgxlock: guard or pin of a transaction"] != 2 || labels["pgxlock: liveness of a session"] < 3 {
		t.Errorf("%d of %d: %v", shown, in, labels)
	}
	if n := len(testkit.Snapshot(t, internal).Holders); n != in+2 {
		t.Errorf("%d holders, want %d", n, in+2)
	}
	if n := testkit.Query[int](t, db, "select count(*) from pgxlock_evictions"); n != 0 {
		t.Errorf("%d evictions are recorded", n)
	}
	for _, lock := range []*pgxlock.Lock{lease, session} {
		if lock.Err() != nil {
			t.Errorf("%s is lost: %v", lock.Key(), lock.Err())
		}
	}

	// Nobody of pgxlock's waits for such a key; somebody else may.
	meddler, pid := testkit.Backend(t, db)
	ended := make(chan error, 1)
	var own pgxlock.Holder
	for _, h := range found {
		if h.Internal && h.Label == "pgxlock: liveness of a session" {
			own = h
		}
	}
	go func() {
		_, err := meddler.PgConn().Exec(t.Context(), fmt.Sprintf("select pg_advisory_lock(%d)", pgxlock.AdvisoryID(own.LockKey()))).ReadAll()
		ended <- err
	}()
	pgtest.Until(t, "it waits", func() bool { return len(testkit.WaitersFor(testkit.Snapshot(t, internal), own.LockKey())) == 1 })
	if w := testkit.WaitersFor(testkit.Snapshot(t, internal), own.LockKey())[0]; w.PID != pid || !w.Internal || w.Label != own.Label || !slices.Equal(w.BlockedBy, []int32{own.PID}) {
		t.Errorf("%+v", w)
	}
	if shot := testkit.Snapshot(t, mon); len(shot.Waiters) == 0 || slices.ContainsFunc(shot.Waiters, func(w monitor.Waiter) bool { return w.Key != "lease" }) {
		t.Errorf("%v", shot.Waiters)
	}
	db.Exec(t, fmt.Sprintf("select pg_terminate_backend(%d)", pid))
	if err := <-ended; err == nil {
		t.Error("it was granted the key of a session that lives")
	}

	testkit.Rollback(t, tx)
	testkit.Rollback(t, open)
	testkit.Release(t, lease)
	testkit.Release(t, <-next)
}

// A lock of a user may carry the mark of pgxlock's own by chance.
func TestLockWithTheMarkAndANameIsAUsers(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	const name = "order:60938740"
	number := pgxlock.RawKey(pgxlock.AdvisoryID(name))
	lock := testkit.Acquire(t, testkit.NewAdvisory(t, db, nil), name)
	for what, test := range map[string]struct {
		cfg    monitor.Config
		filter monitor.Filter
		want   string
	}{
		"nobody knows the name":       {monitor.Config{}, monitor.Filter{}, ""},
		"its name is configured":      {monitor.Config{Names: []string{name}}, monitor.Filter{}, name},
		"its number is configured":    {monitor.Config{Names: []string{number}}, monitor.Filter{}, number},
		"its name is asked for":       {monitor.Config{}, monitor.Filter{Key: name}, name},
		"its number is asked for":     {monitor.Config{}, monitor.Filter{Key: number}, number + " internal"},
		"pgxlock's own are asked for": {monitor.Config{}, monitor.Filter{Internal: true}, number + " internal"},
	} {
		found, err := testkit.NewMonitor(t, db, &test.cfg).Holders(t.Context(), test.filter)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, h := range found {
			if h.ID == lock.Holder() && pgxlock.AdvisoryID(h.LockKey()) == pgxlock.AdvisoryID(name) {
				got = append(got, h.LockKey()+map[bool]string{true: " internal"}[h.Internal])
			}
		}
		if strings.Join(got, ",") != test.want {
			t.Errorf("%s: %q, want %q", what, got, test.want)
		}
	}
	if !evict(t, testkit.NewMonitor(t, db, nil), holder(t, testkit.NewMonitor(t, db, nil), name)) {
		t.Error("it was not the holder")
	}
	wantEvicted(t, lock)
}

// A time that nobody knows is not shown as one.
func TestUnknownTimeIsNotWrittenDown(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 23, 8, 15, 0, 0, time.UTC)
	unknown := pgxlock.Holder{Key: "#7", Raw: true, Kind: pgxlock.KindAdvisory, ID: "psql:42", PID: 42}
	known := pgxlock.Holder{Key: "k", Kind: pgxlock.KindLease, Mode: pgxlock.Shared, ID: "pod-7", Token: 9, Since: at, Expires: at.Add(time.Minute)}
	waiter, since := monitor.Waiter{Key: "k", Kind: pgxlock.KindLease, Owner: "pod-8", Behind: 2}, monitor.Waiter{Key: "k", Owner: "pod-8", Kind: pgxlock.KindLease, Since: at}
	shot := monitor.Snapshot{At: at, Holders: []pgxlock.Holder{unknown, known}, Waiters: []monitor.Waiter{waiter}}
	for what, test := range map[string]struct {
		value      any
		text, json string
	}{
		"a holder since nobody knows when": {unknown, "advisory #7 held by psql:42", `"holder":{"key":"#7","kind":"advisory","holder":"psql:42","pid":42}`},
		"a holder":                         {known, `shared lease "k" held by pod-7 since 2026-11-23T08:15:00Z, token 9`, `"holder":{"key":"k","kind":"lease","mode":"shared","holder":"pod-7","token":9,"since":"2026-11-23T08:15:00Z","expires":"2026-11-23T08:16:00Z"}`},
		"a waiter since nobody knows when": {waiter, `pod-8 waits for lease "k", and 2 more of it`, `"holder":{"key":"k","kind":"lease","waiter":"pod-8","behind":2}`},
		"a waiter":                         {since, `pod-8 waits for lease "k" since 2026-11-23T08:15:00Z`, `"holder":{"key":"k","kind":"lease","waiter":"pod-8","since":"2026-11-23T08:15:00Z"}`},
		"a snapshot":                       {shot, "", ""},
		"one that is being evicted":        {pgxlock.Holder{Key: "k", Kind: pgxlock.KindAdvisory, ID: "A", State: pgxlock.StateLive, EvictedBy: "ops", EvictionReason: "drained"}, `advisory "k" held by A, being evicted by ops: drained`, ""},
		"one that was evicted before":      {pgxlock.Holder{Key: "k", Kind: pgxlock.KindLease, ID: "*evicted", State: pgxlock.StateExpired, EvictedBy: "ops", EvictionReason: "drained"}, `lease "k" held by *evicted, evicted by ops: drained`, `"evicted_by":"ops","eviction_reason":"drained"`},
	} {
		text := fmt.Sprint(test.value)
		encoded, err := json.Marshal(test.value)
		if err != nil {
			t.Fatal(err)
		}
		var log, lines strings.Builder
		slog.New(slog.NewJSONHandler(&log, nil)).Info("", "holder", test.value)
		slog.New(slog.NewTextHandler(&lines, nil)).Info("", "holder", test.value)
		if !strings.Contains(text, test.text) || !strings.Contains(log.String(), test.json) {
			t.Errorf("%s: %s\n%s", what, text, log.String())
		}
		for _, said := range []string{text, fmt.Sprintf("%+v", test.value), string(encoded), log.String(), lines.String()} {
			if strings.Contains(said, "0001-01-01") {
				t.Errorf("%s: %s", what, said)
			}
		}
	}
	for _, h := range []pgxlock.Holder{known, unknown} {
		var back pgxlock.Holder
		if encoded, err := json.Marshal(h); err != nil || json.Unmarshal(encoded, &back) != nil || back != h {
			t.Errorf("%s became %v: %v", encoded, back, err)
		}
	}
}

func TestOldestSnapshotIsShown(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := quietServer(t)
	tx := testkit.Begin(t, db, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if _, err := tx.Exec(t.Context(), "select 1"); err != nil {
		t.Fatal(err)
	}
	shot := testkit.Snapshot(t, testkit.NewMonitor(t, db, nil))
	load := shot.Load
	if pid := int32(tx.Conn().PgConn().PID()); load.OldestPID != pid || load.OldestSince.IsZero() || load.OldestSince.After(shot.At) {
		t.Errorf("%+v, want process %d", load, pid)
	}
}

func TestLockersPublishTheNamesOfWhatTheyHoldForLong(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	locks := testkit.NewAdvisory(t, db, nil)
	testkit.Acquire(t, locks, "held for long")
	testkit.Acquire(t, locks, pgxlock.RawKey(7))
	mon := testkit.NewMonitor(t, db, nil)
	pgtest.Until(t, "the name is published", func() bool { return testkit.Query[int](t, db, "select count(*) from pgxlock_names") > 0 })
	if names := testkit.Query[string](t, db, "select string_agg(name, ',') from pgxlock_names"); names != "held for long" {
		t.Errorf("%q", names)
	}
	if h := testkit.HoldersOf(testkit.Snapshot(t, mon), "held for long"); len(h) != 1 {
		t.Errorf("%+v", h)
	}
	db.Exec(t, "insert into pgxlock_names values (7, 'not so', now())")
	if h := testkit.HoldersOf(testkit.Snapshot(t, mon), pgxlock.RawKey(7)); len(h) != 1 {
		t.Errorf("%+v", h)
	}
}

func TestWatchYieldsSnapshotsAndGoesOnAfterAnError(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	mon := testkit.NewMonitor(t, db, nil)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	n := 0
	for shot, err := range mon.Watch(ctx, time.Second) {
		if err != nil || shot.At.IsZero() {
			t.Errorf("%+v, %v", shot, err)
		}
		if n++; n == 2 {
			cancel()
		}
	}
	if n != 2 {
		t.Errorf("%d snapshots", n)
	}
	for _, err := range mon.Watch(t.Context(), time.Second-1) {
		if err == nil || !strings.Contains(err.Error(), "at least 1 s") {
			t.Errorf("%v", err)
		}
	}

	p, through := testkit.Proxied(t, db)
	var seen []string
	for _, err := range testkit.NewMonitor(t, through, nil).Watch(t.Context(), time.Second) {
		switch {
		case err == nil && len(seen) == 0:
			seen = append(seen, "there")
			p.Refuse()
			p.Cut()
		case err != nil && len(seen) == 1:
			seen = append(seen, "away")
			p.Heal()
		case err == nil && len(seen) == 2:
			seen = append(seen, "back")
		}
		if len(seen) == 3 {
			break
		}
	}
	if !slices.Equal(seen, []string{"there", "away", "back"}) {
		t.Errorf("%q", seen)
	}
}

// Its statements are files that psql runs as they are.
func TestStatementsOfTheMonitorRunByThemselves(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	db.Exec(t, "select acquire_lock('order:1', 'A'), acquire_lock('order:2', 'A'), acquire_lock('k', 'A')")
	files, err := fs.Glob(os.DirFS("../.."), "sql/monitor/*.sql")
	if err != nil || len(files) < 7 {
		t.Fatalf("%q, %v", files, err)
	}
	conn, _ := testkit.Backend(t, db)
	testkit.ExecOn(t, conn, "set pgxlock.prefix = 'order:'")
	for _, file := range files {
		text, err := fs.ReadFile(os.DirFS("../.."), file)
		if err != nil {
			t.Fatal(err)
		}
		if file == "sql/monitor/settings.sql" || file == "sql/monitor/session.sql" { // they are the program's
			continue
		}
		results, err := conn.PgConn().Exec(t.Context(), string(text)).ReadAll()
		if err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		if rows := len(results[0].Rows); strings.HasPrefix(file, "sql/monitor/leases") && rows != 2 {
			t.Errorf("%s: %d rows", file, rows)
		}
	}
}

func TestMonitorRefusesInvalidRequests(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for what, test := range map[string]struct {
		pool *pgxpool.Pool
		cfg  *monitor.Config
		says string
	}{
		"no pool":       {nil, nil, "the pool is nil"},
		"a schema":      {db.Pool, &monitor.Config{Schema: "pg_x"}, "monitor.Config.Schema"},
		"an empty name": {db.Pool, &monitor.Config{Names: []string{""}}, "monitor.Config.Names: the key is empty"},
	} {
		if _, err := monitor.New(test.pool, test.cfg); err == nil || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v", what, err)
		}
	}
	mon := testkit.NewMonitor(t, db, nil)
	for says, filter := range map[string]monitor.Filter{
		"Filter.Kind": {Kind: pgxlock.KindMemory}, "Filter.Key": {Key: "a\x00b"}, "Filter.Prefix": {Prefix: "\x00#"},
	} {
		if _, err := mon.Holders(t.Context(), filter); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%+v: %v", filter, err)
		}
	}
	for _, reason := range []string{"", strings.Repeat("y", 901)} {
		if _, err := mon.Evict(t.Context(), pgxlock.Holder{Kind: pgxlock.KindLease, Key: "k", ID: "A", Token: 1}, reason); err == nil || !strings.Contains(err.Error(), "reason") {
			t.Errorf("%v", err)
		}
	}
	if _, err := mon.Evict(t.Context(), pgxlock.Holder{Kind: pgxlock.KindMemory}, "why"); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("%v", err)
	}
	if _, err := mon.Reap(t.Context(), -1); err == nil || !strings.Contains(err.Error(), "age is -1ns") {
		t.Errorf("%v", err)
	}
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	if shot := testkit.Snapshot(t, mon); len(shot.Missing) > 0 { // it is found once it is there
		t.Errorf("missing: %q", shot.Missing)
	}
}
