//go:build unix

package main

import (
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// long is a period that does not end during a test.
const long = "520w"

// onceOn runs once for the key k where nothing else is said.
func onceOn(t *testing.T, db *pgtest.DB, script string, flags ...string) result {
	t.Helper()
	return answered(t, append(append([]string{"once", "--database-url", db.URL, "--every", long, "k"}, flags...), "--", "sh", "-c", script)...)
}

// runsOf are the runs that are recorded, one a line.
func runsOf(t *testing.T, db *pgtest.DB) string {
	t.Helper()
	var runs string
	if err := db.Pool.QueryRow(t.Context(), "select coalesce(string_agg(concat_ws(' ', run_key, state, attempt, error), E'\n' order by run_key), '') from pgxlock_runs").Scan(&runs); err != nil {
		t.Fatal(err)
	}
	return runs
}

func TestOnceRunsItsCommandInOneOfManyProcesses(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	ways, want := []string{"", "--retry"}, "once succeeded 1\nonce--retry succeeded 1"
	if testing.Short() {
		ways, want = ways[:1], "once succeeded 1"
	}
	for _, way := range ways {
		flags, key := strings.Fields(way), "once"+way
		var all []*running
		for range 4 {
			all = append(all, startCommand(t, "once", db.URL, "echo ran", append(flags, "--every", long, key)...))
		}
		ran := 0
		for _, r := range all {
			text, err := io.ReadAll(r.stdout)
			if err != nil {
				t.Fatal(err)
			}
			r.ends(t, exitOK)
			switch said := r.stderr.String(); {
			case string(text) == "ran\n" && said == "":
				ran++
			case len(text) > 0 || said != `pgxlock: "`+key+`" was already started in this period of 3640d, and has succeeded`+"\n" &&
				!strings.HasPrefix(said, `pgxlock: "`+key+`" was already started in this period of 3640d, and has not ended`):
				t.Errorf("it printed %q and said %q", text, said)
			}
		}
		if ran != 1 {
			t.Errorf("%d ran", ran)
		}
	}
	if got := runsOf(t, db); got != want {
		t.Errorf("recorded: %s, want %s", got, want)
	}
	answered(t, "runs", "--database-url", db.URL).want(t, exitOK, " 3640d  succeeded ", "")
	if testing.Short() {
		return
	}
	onceOn(t, db, "echo ran").want(t, exitOK, "ran\n", "")
	onceOn(t, db, "echo ran", "-E", "75").want(t, exitBusy, "", "already")
	onceOn(t, db, "echo ran", "-q").want(t, exitOK, "", "")
	onceOn(t, db, "echo ran", "--schema", "nope").want(t, exitInternal, "", "pgxlock migrate up")
}

func TestOnceTellsItsCommandWhichRunItIs(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	const script = `echo "$PGXLOCK_KEY/$PGXLOCK_SLOT/$PGXLOCK_ATTEMPT/$PGXLOCK_HOLDER/$PGXLOCK_TOKEN"`
	inner := program(t, nil, "once", "--database-url", db.URL, "it's", "--every", long, "--", "sh", "-c", script)
	r := answered(t, append([]string{"run", "--database-url", db.URL, "outer", "--"}, inner.Args...)...)
	var slot time.Time
	if err := db.Pool.QueryRow(t.Context(), "select slot from pgxlock_runs").Scan(&slot); err != nil {
		t.Fatal(err)
	}
	r.want(t, exitOK, "it's/"+slot.UTC().Format(time.RFC3339)+"/1//\n", "")

	r = onceOn(t, db, script, "--retry")
	r.want(t, exitOK, "run:k@"+slot.UTC().Format(time.RFC3339)+"/"+slot.UTC().Format(time.RFC3339)+"/1/", "")
	answered(t, "once", "--database-url", db.URL, "zone", "--every", "1d", "--zone", "Asia/Kathmandu", "--offset", "3h", "--", "sh", "-c", script).
		want(t, exitOK, "T03:00:00+05:45/1//", "")
}

func TestFailedRunIsStartedAgainOnlyWithRetry(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	onceOn(t, db, "exit 7").want(t, 7, "", "")
	onceOn(t, db, "echo ran").want(t, exitRunFailed, "", "already started in this period of 3640d, and has failed: the command exited with 7; it starts again only after pgxlock runs forget k")
	onceOn(t, db, "echo ran", "-E", "75").want(t, exitRunFailed, "", "has failed")
	onceOn(t, db, "echo ran", "-q").want(t, exitRunFailed, "", "")
	if got, want := runsOf(t, db), "k failed 1 the command exited with 7"; got != want {
		t.Errorf("recorded: %q, want %q", got, want)
	}
	db.Exec(t, "delete from pgxlock_runs")
	onceOn(t, db, "exit 7", "--retry").want(t, 7, "", "")
	onceOn(t, db, "kill -KILL $$", "--retry").want(t, exitSignal+int(syscall.SIGKILL), "", "")
	onceOn(t, db, "echo ran $PGXLOCK_ATTEMPT", "--retry").want(t, exitOK, "ran 3\n", "")
	onceOn(t, db, "echo ran", "--retry").want(t, exitOK, "", "already started")
	if got, want := runsOf(t, db), "k succeeded 3"; got != want {
		t.Errorf("recorded: %q, want %q", got, want)
	}
}

func TestRunOfAKilledProcessIsStartedAgainWithRetry(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	first := startCommand(t, "once", db.URL, trapping(obedient), "--retry", "--ttl", "1h", "--every", long, "k")
	first.says(t, "ready")
	onceOn(t, db, "echo ran", "--retry").want(t, exitOK, "", "already started")
	first.signal(t, syscall.SIGKILL)
	first.says(t, "told")
	onceOn(t, db, "echo ran", "--retry").want(t, exitOK, "", "already started")
	db.Exec(t, "update distributed_locks set expires_at = clock_timestamp()")
	onceOn(t, db, "echo ran $PGXLOCK_ATTEMPT", "--retry").want(t, exitOK, "ran 2\n", "")
}

func TestOnceEndsItsCommandWhenTheLeaseOfTheRunIsLost(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	r := startCommand(t, "once", db.URL, trapping(obedient), append(roomy[:len(roomy):len(roomy)], "--retry", "--every", long, "k")...)
	r.says(t, "ready")
	db.Exec(t, "select evict_lock(lock_name, holder_id, fencing_token, 'why') from lock_leases where lock_name like 'run:k@%'")
	r.says(t, "told")
	r.ends(t, exitLost)
	if text := r.stderr.String(); !strings.Contains(text, "evicted by postgres: why; ending the command") {
		t.Errorf("it said %q", text)
	}
	if got := runsOf(t, db); !strings.HasPrefix(got, "k failed 1 the command was ended") {
		t.Errorf("recorded: %q", got)
	}
}

// Without a lease there is nothing that ends the command but a signal.
func TestOncePassesSignalsOn(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	onceOn(t, db, "kill -KILL $$").want(t, exitSignal+int(syscall.SIGKILL), "", "")
	onceOn(t, db, "echo ran").want(t, exitRunFailed, "", "has failed: the command was ended by signal: killed;")
	db.Exec(t, "delete from pgxlock_runs")
	r := startCommand(t, "once", db.URL, trapping("trap 'echo told; exit 3' TERM"), "--every", long, "k")
	r.says(t, "ready")
	r.signal(t, syscall.SIGTERM)
	r.says(t, "told")
	r.ends(t, 3)
	if got, want := runsOf(t, db), "k failed 1 the command exited with 3, after pgxlock passed on signal: terminated"; got != want {
		t.Errorf("recorded: %q, want %q", got, want)
	}
}

func TestOnceWithoutADatabaseExits69(t *testing.T) {
	t.Parallel()
	for _, flags := range [][]string{nil, {"--retry"}} {
		execute(t, []string{"DATABASE_URL=postgres://me@" + closed + "/db"}, append(append([]string{"once", "k", "--every", "1d"}, flags...), "--", "echo", "ran")...).
			want(t, exitUnavailable, "", "connection refused")
	}
}

func TestSpansHaveDaysAndWeeks(t *testing.T) {
	t.Parallel()
	const day = 24 * time.Hour
	for text, want := range map[string]time.Duration{
		"1d": day, "1w": 7 * day, "2w3d": 17 * day, "1d12h": 36 * time.Hour, "1d90": day + 90*time.Second, "15m": 15 * time.Minute, "0.5": time.Second / 2, "-1s": -time.Second,
		"": -1, "d": -1, "1dd": -1, "1d1w": -1, "1.5d": -1, "-1d": -1, "1d-1h": -1, "99999d": -1, "9999w9999d2000000h": -1, "1e300": -1, "NaN": -1, "day": -1,
	} {
		var got span
		err := got.Set(text)
		if (err != nil) != (want == -1) || err == nil && time.Duration(got) != want {
			t.Errorf("%q: %s, %v; want %s", text, time.Duration(got), err, want)
		}
	}
}

func TestMisuseOfOnceAndLeadIsNamed(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ args, says string }{
		{"once k -- true", "--every is missing; name the period, such as --every 1d"},
		{"once k --every 1d", "the command is missing: pgxlock once KEY -- COMMAND (see pgxlock once --help)"},
		{"once k --every 1d true", "-- is missing before the command: pgxlock once KEY -- COMMAND (see"},
		{"once k --every day -- true", `--every "day": use a duration such as 1d, 1w, 1d12h, 90s, or 90 for seconds (see`},
		{"once k --every 0 -- true", "--every is 0s, it must be between 1ms and 3650d"},
		{"once k --every 522w -- true", "--every is 3654d, it must be between 1ms and 3650d"},
		{"once k --every 1d --offset 1d -- true", "--offset is 1d, it must be at least 0 and less than --every, 1d"},
		{"once k --every 12h --zone Europe/Berlin -- true", "--zone is for periods of whole days, and --every is 12h; leave it out"},
		{"once k --every 1d --zone Europe/Atlantis -- true", `--zone "Europe/Atlantis" is no time zone; use a name such as Europe/Berlin`},
		{"once k --every 1d --zone Local -- true", `--zone "Local" is no time zone; use a name such as Europe/Berlin`},
		{"once k --every 1d --zone= -- true", "--zone is empty"},
		{"once k --every 1d --ttl 9s -- true", "--ttl and --grace are for the lease of --retry; leave them out, or add --retry"},
		{"once k --every 1d --retry --ttl 10ms -- true", "--ttl is 10ms, it must be 1s or more"},
		{"once k --every 1d --first later -- true", `--first "later": use now or next`},
		{"runs forget", "the key is missing: pgxlock runs forget KEY (see pgxlock runs forget --help)"},
		{"runs forget k --run yesterday", `--run "yesterday" is no time; use one that pgxlock runs shows, such as 2026-03-29T00:00:00Z`},
		{"runs froget", `unknown command "froget" for "pgxlock runs"; did you mean forget?`},
		{"runs --limit 0", "--limit is 0, it must be between 1 and 10000"},
		{"runs --state over", `--state "over": use running, succeeded, failed, abandoned, skipped`},
		{"runs --key=", "--key is empty"},
		{"once k --every 1d -E 256 -- true", "--conflict-exit-code is 256"},
		{"once " + strings.Repeat("k", 201) + " --every 1d -- true", "the key has 201 characters, 200 are allowed for runs"},
		{"lead -- true", "the key is missing: pgxlock lead KEY -- COMMAND (see pgxlock lead --help)"},
		{"lead k --ttl 12s --grace 5s -- true", "--grace is 5s, with --ttl 12s it must be between 1s and 4s"},
		{"lead k --kind advisory --metadata x -- true", "--metadata is for leases only; leave out --kind advisory"},
		{"lead k --health-file= -- true", "--health-file is empty"},
		{"lead " + strings.Repeat("k", 256) + " -- true", "the key has 256 characters"},
		{"step-down", "the key is missing: pgxlock step-down KEY (see pgxlock step-down --help)"},
		{"step-down k --kind session", "use lease or advisory"},
	} {
		r := executeHere(t, nowhere, strings.Fields(test.args)...)
		r.want(t, exitUsage, "", test.says)
		if strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%s: not one line: %q", test.args, r.stderr)
		}
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	port := taken.Addr().String()
	for addr, says := range map[string]string{
		port:     "pgxlock: --health-addr " + port + ": address already in use; choose another address\n",
		"8080":   `pgxlock: --health-addr "8080" is a port alone; use :8080 or 127.0.0.1:8080` + "\n",
		"a.host": `pgxlock: --health-addr "a.host" is no address; use host:port, such as 127.0.0.1:8474` + "\n",
		":99999": "pgxlock: --health-addr 127.0.0.1:99999: ",
	} {
		r := execute(t, []string{"DATABASE_URL=" + nowhere}, "lead", "k", "--health-addr", addr, "--", "true")
		if r.want(t, exitUsage, "", says); strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%s: not one line: %q", addr, r.stderr)
		}
	}
	for _, name := range []string{"lead", "once"} {
		args := []string{name, "k", "--every", "1d", "--", "there-is-no-such-command"}
		if name == "lead" {
			args = append(args[:2], args[4:]...)
		}
		executeHere(t, nowhere, args...).want(t, exitNotFound, "", "there-is-no-such-command")
	}
}

func TestOnceNamesThePeriodOfAProgramThatDisagrees(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	call := func(key string, flags ...string) result {
		t.Helper()
		return answered(t, append(append([]string{"once", "--database-url", db.URL, key}, flags...), "--", "echo", "ran")...)
	}
	call("k", "--every", long).want(t, exitOK, "ran\n", "")
	call("k", "--every", "519w").want(t, exitOK, "ran\n", `pgxlock: another program starts "k" once in 3640d, and this one once in 3633d; give both the same --every, --offset and --zone, or different keys`)
	db.Exec(t, "update pgxlock_runs set state = 'failed', error = 'broken' where period = interval '3633 days'")
	call("k", "--every", "519w", "-E", "75").want(t, exitRunFailed, "", `pgxlock: "k" was already started in this period of 3633d, and has failed: broken; `) // and not the latest, which succeeded
	call("k", "--every", long, "-E", "75").want(t, exitBusy, "", `pgxlock: "k" was already started in this period of 3640d, and has succeeded`)
	call("k", "--every", long, "--offset", "1s").want(t, exitOK, "", `pgxlock: "k" was already started in this period of 3640d, offset 1s, by a program that starts it once in 3640d, and has succeeded`)
	call("k", "--every", long, "--offset", "1s", "-q").want(t, exitOK, "", "")
	db.Exec(t, "insert into pgxlock_runs (run_key, slot, state, attempt, holder, started_at, keep_until) select 'ticks', slot, 'succeeded', 1, 'cron', now(), keep_until from pgxlock_runs where period = interval '3640 days'")
	call("ticks", "--every", long).want(t, exitOK, "", `pgxlock: "ticks" was already started in this period of 3640d, by a program that starts it once in each tick of a schedule, and has succeeded`)
}
