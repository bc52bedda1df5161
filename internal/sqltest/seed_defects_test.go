package sqltest_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"

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
