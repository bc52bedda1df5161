package sqltest_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// defect is something that the widely copied SQL which pgxlock replaces gets
// wrong. The same calls run against both, each in its own database.
type defect struct {
	name string // D01_what_goes_wrong
	seed string // what comes of it there
	ours string // and here
	run  func(d *database) string
}

// TestSeedDefects shows each defect of the seed's SQL, and what pgxlock does in
// the same place. With PGXLOCK_SEED_DEFECTS=table it prints them as a table.
func TestSeedDefects(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	defects := slices.Concat(timeDefects, concurrencyDefects, inputDefects, holderDefects, serverDefects)
	slices.SortFunc(defects, func(a, b defect) int { return strings.Compare(a.name, b.name) })
	seed, ours := installSeed(t), install(t)
	for _, d := range defects {
		t.Run(d.name, func(t *testing.T) {
			if got := d.run(seed.reopen(t)); got != d.seed {
				t.Errorf("the seed: %s; want: %s", got, d.seed)
			}
			if got := d.run(ours.reopen(t)); got != d.ours {
				t.Errorf("pgxlock: %s; want: %s", got, d.ours)
			}
		})
	}
	if os.Getenv("PGXLOCK_SEED_DEFECTS") == "table" {
		printDefects(defects, t.Failed())
	}
}

// printDefects prints what the subtests have verified.
func printDefects(defects []defect, failed bool) {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, "\tDEFECT\tTHE SEED\tPGXLOCK")
	for _, d := range defects {
		number, name, _ := strings.Cut(d.name, "_")
		ours := d.ours
		if ours == d.seed {
			ours = "the same, on purpose and documented"
		}
		_, _ = fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", number, strings.ReplaceAll(name, "_", " "), d.seed, ours)
	}
	if err := w.Flush(); err != nil {
		panic(err)
	}
	if failed {
		fmt.Println("Some of this is not so: see the failed tests.")
	}
}

// installSeed makes a database with the seed's table and functions.
func installSeed(t *testing.T) *database {
	t.Helper()
	d := open(t, pgtest.New(t).URL)
	d.do(seedSQL(t))
	return d
}

func seedSQL(t *testing.T) string {
	t.Helper()
	sql, err := os.ReadFile("../../testdata/seed.sql")
	if err != nil {
		t.Fatal(err)
	}
	return string(sql)
}

// line joins what happened into one line.
func line(parts ...string) string { return strings.Join(parts, "; ") }

// waitsOr runs an expression that may wait for the open transaction of another
// session. If it does, that transaction is rolled back.
func (s *session) waitsOr(expression string, other *session) string {
	s.t.Helper()
	c := s.start(expression)
	waits := c.waitsOrEnds()
	other.rollback()
	if got := c.outcome(); !waits {
		return got
	}
	return "waits"
}

// words names outcomes for readers.
func words(outcome string) string {
	switch outcome {
	case "true":
		return "granted"
	case "false":
		return "busy"
	default:
		return outcome
	}
}

var timeDefects = []defect{
	{
		name: "D01_a_lease_taken_late_in_a_transaction_is_born_expired",
		seed: "granted; expired at once",
		ours: "granted; lives its full ttl",
		run: func(d *database) string {
			d.do("begin; select pg_sleep_until(now() + interval '1.1 s')") // the statements run in one transaction
			before := quote(d.get("clock_timestamp()"))
			granted := words(d.get("acquire_lock('k', 'A', 1)"))
			defer d.commit()
			switch d.get("select expires_at - " + before + " >= interval '1 s' from distributed_locks") {
			case "true":
				return line(granted, "lives its full ttl")
			default:
				return line(granted, "expired at once")
			}
		},
	},
	{
		name: "D02_an_old_transaction_judges_and_renews_by_an_old_clock",
		seed: "expired lease: busy; renewal moves the expiry back",
		ours: "expired lease: granted; renewal moves the expiry on",
		run: func(d *database) string {
			old := d.begin(readCommitted)
			d.do("select acquire_lock('expired', 'X'), acquire_lock('mine', 'A')")
			d.do("update distributed_locks set expires_at = clock_timestamp() where lock_name = 'expired'")
			take := words(old.get("acquire_lock('expired', 'A')"))
			before := d.get("select expires_at from distributed_locks where lock_name = 'mine'")
			old.do("select acquire_lock('mine', 'A')")
			moved := "back"
			if old.get("select expires_at > "+quote(before)+" from distributed_locks where lock_name = 'mine'") == "true" {
				moved = "on"
			}
			return line("expired lease: "+take, "renewal moves the expiry "+moved)
		},
	},
	{
		name: "D14_a_release_after_the_expiry_says_true",
		seed: "true",
		ours: "false",
		run: func(d *database) string {
			d.do("select acquire_lock('k', 'A')")
			d.expire("k")
			released := d.get("release_lock('k', 'A')")
			if n := d.get("select count(*) from distributed_locks"); n != "0" {
				return "the row is still there"
			}
			return released
		},
	},
}

var concurrencyDefects = []defect{
	{
		name: "D03_a_try_waits_for_uncommitted_work",
		seed: "uncommitted acquire: waits; uncommitted release: waits",
		ours: "uncommitted acquire: busy; uncommitted release: busy",
		run: func(d *database) string {
			a, b := d.sessions()
			a.do("begin; select acquire_lock('k', 'A')")
			acquire := words(b.waitsOr("acquire_lock('k', 'B')", a))
			a.do("select acquire_lock('l', 'A'); begin; select release_lock('l', 'A')")
			release := words(b.waitsOr("acquire_lock('l', 'B')", a))
			return line("uncommitted acquire: "+acquire, "uncommitted release: "+release)
		},
	},
	{
		name: "D04_a_failed_try_locks_the_holders_row",
		seed: "the failed try draws an xid; the holder's renewal waits",
		ours: "the failed try leaves nothing; the holder's renewal passes",
		run: func(d *database) string {
			a, b := d.sessions()
			a.do("select acquire_lock('k', 'A')")
			b.do("begin; select acquire_lock('k', 'B')")
			trace := "the failed try draws an xid"
			if b.get("pg_current_xact_id_if_assigned()") == "NULL" {
				trace = "the failed try leaves nothing"
			}
			renewal := a.waitsOr("acquire_lock('k', 'A')", b)
			if renewal == "true" {
				renewal = "passes"
			}
			return line(trace, "the holder's renewal "+renewal)
		},
	},
	{
		name: "D05_two_transactions_that_take_two_names_deadlock",
		seed: "40P01, deadlock",
		ours: "both are told busy",
		run: func(d *database) string {
			a, b := d.sessions()
			a.do("set deadlock_timeout = '10ms'; begin; select acquire_lock('k', 'A')")
			b.do("set deadlock_timeout = '10ms'; begin; select acquire_lock('l', 'B')")
			first := a.start("acquire_lock('l', 'A')")
			first.waitsOrEnds()
			second := b.outcome("acquire_lock('k', 'B')")
			b.rollback() // lets the first one end, if it is not the victim
			switch got := first.outcome() + " " + second; got {
			case "40P01 true", "true 40P01":
				return "40P01, deadlock"
			case "false false":
				return "both are told busy"
			default:
				return got
			}
		},
	},
	{
		name: "D06_a_snapshot_older_than_a_renewal_fails_to_serialize",
		seed: "try: 40001; release: 40001",
		ours: "try: 40001; release: 40001",
		run: func(d *database) string {
			// Documented: above READ COMMITTED acquire and release in a
			// transaction of their own.
			d.do("select acquire_lock('k', 'A')")
			d.expire("k")
			old := d.begin("repeatable read")
			d.do("update distributed_locks set expires_at = clock_timestamp() + interval '1 minute'") // as a late renewal does
			try := old.outcome("acquire_lock('k', 'B')")
			old.rollback()
			old.begin("repeatable read")
			d.do("select acquire_lock('k', 'A')")
			return line("try: "+try, "release: "+old.outcome("release_lock('k', 'A')"))
		},
	},
	{
		name: "D07_a_snapshot_older_than_a_release_sees_the_name_twice",
		seed: "2 rows of one name",
		ours: "40001",
		run: func(d *database) string {
			d.do("select acquire_lock('k', 'A')")
			old := d.begin("repeatable read")
			d.do("select release_lock('k', 'A')")
			if got := old.outcome("acquire_lock('k', 'A')"); got != "true" {
				return got
			}
			return old.get("select count(*) from distributed_locks where lock_name = 'k'") + " rows of one name"
		},
	},
	{
		name: "D16_the_index_on_expires_at_makes_renewals_expensive",
		seed: "0 of 10 renewals are heap-only",
		ours: "10 of 10 renewals are heap-only",
		run: func(d *database) string {
			d.do("vacuum distributed_locks") // the page must have room: another test may have had this database
			d.do("select acquire_lock('k', 'A')")
			const counter = "pg_stat_get_xact_tuples_hot_updated('distributed_locks'::regclass)"
			d.begin(readCommitted) // outside of which the counter may be reset
			before := d.number(counter)
			for range 10 {
				d.do("select acquire_lock('k', 'A')")
			}
			hot := d.number(counter) - before
			d.commit()
			return fmt.Sprintf("%d of 10 renewals are heap-only", hot)
		},
	},
}

// stored tells how many leases there are after the outcome of a call.
func (d *database) stored(outcome string) string {
	d.t.Helper()
	if d.get("select count(*) from distributed_locks") == "0" {
		return outcome + ", nothing stored"
	}
	return outcome + ", stored"
}

var inputDefects = []defect{
	{
		name: "D08_a_name_that_is_too_long_leaks_under_another_name",
		seed: "false, stored; the name without the blanks: busy",
		ours: "22023, nothing stored; the name without the blanks: granted",
		run: func(d *database) string {
			first := d.stored(d.outcome("acquire_lock(repeat('x', 255) || '  ', 'A')"))
			return line(first, "the name without the blanks: "+words(d.outcome("acquire_lock(repeat('x', 255), 'B')")))
		},
	},
	{
		name: "D09_a_ttl_of_0_is_granted_and_NULL_is_released_in_silence",
		seed: "ttl 0: true, expired at once; name '': true; release of NULL: false",
		ours: "ttl 0: 22023; name '': 22023; release of NULL: 22023",
		run: func(d *database) string {
			ttl := d.outcome("acquire_lock('k', 'A', 0)")
			if d.get("select expires_at <= clock_timestamp() from distributed_locks") == "true" {
				ttl += ", expired at once"
			}
			return line("ttl 0: "+ttl, "name '': "+d.outcome("acquire_lock('', 'A')"),
				"release of NULL: "+d.outcome("release_lock(NULL, 'A')"))
		},
	},
	{
		name: "D10_metadata_is_neither_refreshed_nor_bounded",
		seed: `renewed with 2: {"v": 1}; NULL: NULL; 1 MB: true`,
		ours: `renewed with 2: {"v": 2}; NULL: {}; 1 MB: 22023`,
		run: func(d *database) string {
			metadata := func(lock string) string {
				return d.get("select metadata from distributed_locks where lock_name = " + quote(lock))
			}
			d.do(`select acquire_lock('k', 'A', 30, '{"v": 1}'), acquire_lock('null', 'A', 30, NULL)`)
			d.do(`select acquire_lock('k', 'A', 30, '{"v": 2}')`)
			return line("renewed with 2: "+metadata("k"), "NULL: "+metadata("null"),
				"1 MB: "+d.outcome("acquire_lock('big', 'A', 30, to_jsonb(repeat('x', 1048576)))"))
		},
	},
	{
		name: "D11_a_ttl_of_type_bigint_is_refused",
		seed: "bigint: 42883; the largest integer: true",
		ours: "bigint: 42883; the largest integer: true", // an overload would make other calls ambiguous
		run: func(d *database) string {
			return line("bigint: "+d.outcome("acquire_lock('k', 'A', 30::bigint)"),
				"the largest integer: "+d.outcome("acquire_lock('k', 'A', 2147483647)"))
		},
	},
	{
		name: "D18_the_answer_is_not_what_the_write_did",
		seed: "false, stored",
		ours: "22023, nothing stored",
		run: func(d *database) string {
			return d.stored(d.outcome("acquire_lock('k', repeat('h', 255) || '  ')"))
		},
	},
}

var holderDefects = []defect{
	{
		name: "D12_a_temporary_table_hijacks_the_functions",
		seed: "a second holder is granted",
		ours: "a second holder is told busy",
		run: func(d *database) string {
			a, b := d.sessions()
			b.do("select acquire_lock('k', 'B')")
			a.do("create temporary table distributed_locks (like distributed_locks including all)")
			if a.get("acquire_lock('k', 'A')") == "true" {
				return "a second holder is granted"
			}
			return "a second holder is told busy"
		},
	},
	{
		name: "D13_one_holder_id_is_one_holder_without_a_count",
		seed: "second acquire: granted; after one release others are granted",
		ours: "second acquire: granted; after one release others are granted", // kept; use a holder id per acquisition
		run: func(d *database) string {
			d.do("select acquire_lock('k', 'A')")
			second := words(d.get("acquire_lock('k', 'A')"))
			d.do("select release_lock('k', 'A')")
			return line("second acquire: "+second, "after one release others are "+words(d.get("acquire_lock('k', 'B')")))
		},
	},
	{
		name: "D17_a_role_that_may_write_the_table_can_forge_a_lease",
		seed: "forged",
		ours: "forged", // kept: access is the table's grants; take them away where that matters
		run: func(d *database) string {
			role := d.role()
			d.do("grant select, insert, update, delete on distributed_locks to " + role)
			d.do("select acquire_lock('k', 'A')")
			other := d.connect()
			other.do("set role " + role + "; update distributed_locks set holder_id = 'mallory'")
			if d.get("select holder_id from distributed_locks") == "mallory" {
				return "forged"
			}
			return "refused"
		},
	},
	{
		name: "D19_an_acquire_that_is_rolled_back_has_said_true",
		seed: "true; then others are granted",
		ours: "true; then others are granted", // inherent: documented
		run: func(d *database) string {
			a, b := d.sessions()
			a.do("begin; savepoint s")
			acquired := a.get("acquire_lock('k', 'A')")
			a.do("rollback to s")
			return line(acquired, "then others are "+words(b.get("acquire_lock('k', 'B')")))
		},
	},
	{
		name: "D20_a_call_in_WHERE_takes_more_than_LIMIT_returns",
		seed: "20 leases for 1 row",
		ours: "20 leases for 1 row", // inherent: documented, with LATERAL as the way to do it
		run: func(d *database) string {
			defer d.do("drop table jobs")
			d.do(`create table jobs as select generate_series(1, 20) as id;
				select id from jobs where acquire_lock('job:' || id, 'A') order by id desc limit 1`)
			return d.get("select count(*) from distributed_locks") + " leases for 1 row"
		},
	},
}

var serverDefects = []defect{
	{
		name: "D15_a_crash_loses_an_acknowledged_lease_when_the_role_commits_asynchronously",
		seed: "lost",
		ours: "still there",
		run: func(d *database) string {
			// The same functions, on a server that may crash.
			server := pgtest.Private(d.t, pgserver.Config{Settings: lazy})
			crashing := open(d.t, server.URL("postgres"))
			if d.get("to_regclass('pgxlock_epoch')") == "NULL" {
				crashing.do(seedSQL(d.t))
			} else {
				crashing = installOn(d.t, server)
			}
			crashing.do("checkpoint")
			crashing.do("set synchronous_commit = off")
			crashing.want("acquire_lock('k', 'A', 600)", "true")
			if crash(d.t, server).get("select count(*) from distributed_locks") == "0" {
				return "lost"
			}
			return "still there"
		},
	},
}
