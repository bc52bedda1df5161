// start_run() and the functions around it: which caller may start what, and what they leave
// behind.

package sqltest_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// A period that no test sees the end of.
const age = "'36500 days'"

func TestRunIsStartedByOneCommittedTransaction(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do("delete from pgxlock_runs")
		for _, start := range []string{
			"start_run('k', " + age + ") is not null",
			"start_run_at('k', current_date)",
		} {
			first, s := d.begin(readCommitted), d.begin(level)
			s.do("create temp table mine ()") // its snapshot is older
			s.want("select count(*) from pgxlock_runs", "0")
			first.want(start, "true")
			call := s.start(start)
			call.waitsFor(first)
			first.rollback()
			call.want("true")
			s.rollback()

			first.begin(readCommitted)
			s.begin(level)
			s.want("select count(*) from pgxlock_runs", "0")
			first.want(start, "true")
			first.want(start, "false")
			call = s.start(start)
			call.waitsFor(first)
			first.commit()
			if level == readCommitted {
				call.want("false")
			} else {
				call.want("40001")
			}
			s.rollback()
			s.begin(level)
			s.want(start, "false")
			d.leavesNothing(s)
			s.rollback()
			d.do("delete from pgxlock_runs")
		}
	})
}

func TestFinishRunSaysWhetherItRan(t *testing.T) {
	t.Parallel()
	d := install(t)
	const slot = "'2026-11-22 12:00+00'"
	for _, run := range []struct{ state, lease, error, finished, becomes string }{
		{"running", "null", "null", "true", "succeeded,NULL"},
		{"running", "null", "'why'", "true", "failed,why"},
		{"running", "null", "repeat('x', 2001)", "true", "failed,2000"},
		{"running", "'l'", "null", "false", "running,NULL"}, // a Locker's own affair
		{"succeeded", "null", "'why'", "false", "succeeded,NULL"},
		{"failed", "null", "null", "false", "failed,NULL"},
	} {
		d.do(fmt.Sprintf("delete from pgxlock_runs; insert into pgxlock_runs values ('k', %s, '%s', 1, 'x', %s, now(), null, null, 'infinity')", slot, run.state, run.lease))
		d.want(fmt.Sprintf("finish_run('k', %s, %s)", slot, run.error), run.finished)
		d.want("select concat_ws(',', state, case when length(error) > 10 then length(error)::text else coalesce(error, 'NULL') end) from pgxlock_runs", run.becomes)
		d.want("select finished_at is not null from pgxlock_runs", run.finished)
	}
	d.want("finish_run('k', now())", "false")
	d.want("finish_run('k', null)", "false")
	d.want("finish_run(null, now())", "22023")
	d.want("forget_run('k', "+slot+")", "true")
	d.want("forget_run('k', "+slot+")", "false")
	d.want("forget_run('', now())", "22023")
}

// The work begins when the start is acknowledged.
func TestStartIsOnDisk(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for setting, want := range map[string]string{"off": "on", "local": "on", "on": "on", "remote_apply": "remote_apply"} {
		d.do("set synchronous_commit = " + setting)
		d.do("begin")
		d.want("start_run('k', "+age+") is null", "false")
		d.want("current_setting('synchronous_commit')", want)
		d.rollback()

		// Asked again because an answer was lost, it is made sure of again: there is
		// something to commit.
		again := "select attempt from pgxlock_start_run('again', now(), null, null, null, '1 day', 'me', null)"
		d.do("insert into pgxlock_runs values ('again', current_date, 'running', 1, 'me', null, now(), null, null, 'infinity') on conflict do nothing")
		d.do("begin")
		d.want(strings.Replace(again, "now()", "current_date", 1), "1")
		d.want("current_setting('synchronous_commit')", want)
		d.want("pg_current_xact_id_if_assigned() is not null", "true")
		d.rollback()
		d.do("begin")
		d.want("pgxlock_finish_run('again', current_date, 'me', 'succeeded', null)", "true")
		d.want("current_setting('synchronous_commit')", want)
		d.rollback()
	}
}

func TestAttemptEndsOnceAndOnlyItsOwn(t *testing.T) {
	t.Parallel()
	d := install(t)
	d.do("insert into pgxlock_runs values ('k', current_date, 'running', 2, 'me', 'l', now(), null, null, 'infinity')")
	finish := func(holder, state, want string) {
		t.Helper()
		d.want(fmt.Sprintf("pgxlock_finish_run('k', current_date, '%s', '%s', 'why')", holder, state), want)
	}
	finish("of attempt 1", "succeeded", "false")
	d.want("select state from pgxlock_runs", "running")
	finish("me", "failed", "true")
	finish("me", "failed", "true") // an answer was lost
	finish("me", "succeeded", "false")
	finish("of attempt 1", "failed", "false")
	d.want("select state || ' ' || error from pgxlock_runs", "failed why")
}

// Of what was started without a lease nobody can tell whether it has crashed.
func TestOnlyWhatMayBeTriedAgainIsDue(t *testing.T) {
	t.Parallel()
	d := install(t)
	for row, want := range map[string]struct{ once, retrying string }{
		"'running', 1, 'x', null":   {"false", "false"},
		"'running', 1, 'x', 'l'":    {"false", "true"},
		"'failed', 1, 'x', null":    {"false", "true"},
		"'succeeded', 1, 'x', 'l'":  {"false", "false"},
		"'withdrawn', 1, 'x', null": {"true", "true"},
		"'skipped', 0, 'x', null":   {"true", "true"},
	} {
		d.do("delete from pgxlock_runs")
		d.do("insert into pgxlock_runs select 'k', pgxlock_slot(now(), " + age + ", '0', 'UTC', 0), " + row + ", now(), null, null, 'infinity'")
		d.want("select due from pgxlock_due_runs('k', "+age+", '0', 'UTC', 0, false)", want.once)
		d.want("select due from pgxlock_due_runs('k', "+age+", '0', 'UTC', 0, true)", want.retrying)
		next := want
		if strings.Contains(row, "skipped") {
			next.once, next.retrying = "false", "false"
		}
		d.want("select due from pgxlock_due_runs('k', "+age+", '0', 'UTC', 0, false, 'next')", next.once)
		d.want("select due from pgxlock_due_runs('k', "+age+", '0', 'UTC', 0, true, 'next')", next.retrying)
	}
	firstRuns(t, d)
	changedSchedules(t, d)
	listedRuns(t, d)
}

// firstRuns are of a key of which nothing is recorded.
func firstRuns(t *testing.T, d *database) {
	t.Helper()
	d.do("delete from pgxlock_runs")
	start := func(first string) string {
		return "start_run('k', " + age + ", '0', 'UTC', '" + first + "') is not null"
	}
	d.want(start("next"), "false")
	d.want("select concat_ws(' ', state, attempt, finished_at, keep_until > now() + '90 years') from pgxlock_runs", "skipped 0 t")
	d.want(start("next"), "false")
	d.want("select count(*) from pgxlock_runs", "1")
	d.want(start("now"), "true")
	d.want("select concat_ws(' ', state, attempt) from pgxlock_runs", "running 1")
	d.want(start("now"), "false")
	// The next period, and a key of which there is another run, are not new.
	d.do("delete from pgxlock_runs")
	d.want("start_run('k', '20 days', '0', 'UTC', 'next') is null", "true")
	d.do("update pgxlock_runs set slot = slot - interval '20 days'")
	d.want("start_run('k', '20 days', '0', 'UTC', 'next') is not null", "true")
	// Ticks are never new.
	d.want("(select attempt from pgxlock_start_run('tick', current_date, null, null, null, '1 day', 'me', null, 'next'))", "1")
	// Concurrent first starts.
	d.do("delete from pgxlock_runs")
	one, two := d.begin(readCommitted), d.connect()
	one.want(start("next"), "false")
	call := two.start(start("next"))
	call.waitsFor(one)
	one.commit()
	call.want("false")
	d.want("select string_agg(state, ' ') from pgxlock_runs", "skipped")
}

// changedSchedules are of a key whose offset or time zone was changed. The clock of the test is
// the row that was written before: its slot is so long before the current one, or after it.
func changedSchedules(t *testing.T, d *database) {
	t.Helper()
	for _, test := range []struct {
		row       string // state and lease
		away      string // of its slot from the current one
		schedule  string // its period, offset and time zone
		now, next string // whether a call with either starts
		retry     string
	}{
		{"'succeeded', 1, 'x', null", "-59 days", "'120 days', '1 h', 'UTC'", "false", "false", "false"},
		{"'succeeded', 1, 'x', null", "-61 days", "'120 days', '1 h', 'UTC'", "true", "true", "true"},
		{"'succeeded', 1, 'x', null", "59 days", "'120 days', '1 h', 'UTC'", "false", "false", "false"}, // it begins later
		{"'succeeded', 1, 'x', null", "-1 h", "'120 days', '0', 'Europe/Berlin'", "false", "false", "false"},
		{"'running', 1, 'x', null", "-1 h", "'120 days', '1 h', 'UTC'", "false", "false", "false"},
		{"'failed', 1, 'x', null", "-1 h", "'120 days', '1 h', 'UTC'", "false", "false", "true"},
		{"'running', 1, 'x', 'l'", "-1 h", "'120 days', '1 h', 'UTC'", "false", "false", "false"}, // it may live
		{"'withdrawn', 1, 'x', null", "-1 h", "'120 days', '1 h', 'UTC'", "true", "true", "true"},
		{"'skipped', 0, 'x', null", "-1 h", "'120 days', '1 h', 'UTC'", "true", "false", "true"},
		{"'succeeded', 1, 'x', null", "-1 h", "'119 days', '1 h', 'UTC'", "true", "true", "true"},    // another length is another period
		{"'succeeded', 1, 'x', null", "-1 h", "null::interval, null, null", "true", "true", "true"},  // a tick
		{"'succeeded', 1, 'x', null", "120 days", "'120 days', '0', 'UTC'", "true", "true", "true"},  // its own, of an early clock
		{"'succeeded', 1, 'x', null", "-120 days", "'2880 h', '0 s', 'UTC'", "true", "true", "true"}, // the same, in other words
	} {
		for call, want := range map[string]string{"null, 'now'": test.now, "null, 'next'": test.next, "'lease', 'now'": test.retry} {
			d.do("delete from pgxlock_runs; select acquire_lock('lease', 'me')")
			d.do("insert into pgxlock_runs select 'k', pgxlock_slot(now(), '120 days', '0', 'UTC', 0) + interval '" + test.away + "', " + test.row +
				", now(), null, null, 'infinity', " + test.schedule)
			lease, first, _ := strings.Cut(call, ", ")
			what := fmt.Sprint(test, " ", call)
			due := "select due from pgxlock_due_runs('k', '120 days', '0', 'UTC', 0, " + fmt.Sprint(lease != "null") + ", " + first + ")"
			if got := d.get(due); got != want {
				t.Errorf("%s: due %s, want %s", what, got, want)
			}
			start := "select attempt is not null from pgxlock_start_run('k', null, '120 days', '0', 'UTC', '1 year', 'me', " + call + ")"
			if got := d.get(start); got != want {
				t.Errorf("%s: started %s, want %s", what, got, want)
			}
		}
	}
	// It says which others there are.
	d.do("delete from pgxlock_runs")
	const other = "select concat_ws('/', other_period, other_offset, other_zone) from pgxlock_start_run('k', null, '120 days', '0', 'UTC', '1 year', 'me', null)"
	d.want(other, "")
	d.do("update pgxlock_runs set period_offset = '1 h', time_zone = 'Asia/Tokyo'")
	d.want(other, "120 days/01:00:00/Asia/Tokyo")
	d.do("update pgxlock_runs set period = '1 h', slot = slot + interval '3 days'")
	d.want(other, "01:00:00/01:00:00/Asia/Tokyo")
	d.do("delete from pgxlock_runs; insert into pgxlock_runs select 'k', now(), 'succeeded', 1, 'x', null, now(), null, null, 'infinity'")
	d.want(other, "00:00:00/00:00:00/")
}

func listedRuns(t *testing.T, d *database) {
	t.Helper()
	d.do("delete from pgxlock_runs; select acquire_lock('live', 'x'), acquire_lock('theirs', 'y')")
	for i, row := range []string{
		"'running', 1, 'x', null", "'succeeded', 1, 'x', null", "'failed', 2, 'x', 'gone'", "'running', 1, 'x', 'live'",
		"'running', 3, 'x', 'gone'", "'running', 1, 'x', 'theirs'", "'skipped', 0, 'x', null", "'withdrawn', 1, 'x', null",
	} {
		d.do(fmt.Sprintf("insert into pgxlock_runs values ('k%d', current_date + %d, %s, now(), null, null, 'infinity', '1 day', '0', 'UTC')", i, i, row))
	}
	const listed = "select string_agg(concat_ws(' ', run_key, state, attempt), ', ') from list_runs"
	d.want(listed+"()", "k6 skipped 0, k5 abandoned 1, k4 abandoned 3, k3 running 1, k2 failed 2, k1 succeeded 1, k0 running 1")
	d.want(listed+"(null, 2)", "k6 skipped 0, k5 abandoned 1")
	d.want(listed+"('k2')", "k2 failed 2")
	d.expire("live")
	d.want(listed+"('k3')", "k3 abandoned 1")
}

// A few at a time; and above READ COMMITTED not at all, where what another one has removed
// meanwhile would be an error.
func TestStartRemovesAFewOldRuns(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("insert into pgxlock_runs select 'old', current_date - i, 'succeeded', 1, 'x', null, now(), now(), null, now() from generate_series(1, 40) i")
	const left = "select count(*) from pgxlock_runs where run_key = 'old'"
	for i, want := range []string{"24", "8", "0"} {
		if i == 2 {
			s := d.begin("repeatable read")
			d.do("update pgxlock_runs set started_at = now() where run_key = 'old'")
			s.want("start_run('above', "+age+") is not null", "true")
			s.commit()
		}
		d.want(fmt.Sprintf("start_run('k%d', %s) is not null", i, age), "true")
		d.want(left, want)
	}
}

// A row that was removed while a start waited for it says nothing about whether it was
// run.
func TestTickIsJudgedWhenItsRowIsLocked(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	tick := quote(d.get("clock_timestamp()"))
	start := func(holder string) string {
		return fmt.Sprintf("select attempt from pgxlock_start_run('k', %s, null, null, null, '1 s', '%s', null)", tick, holder)
	}
	first, second := d.begin(readCommitted), d.connect()
	first.want(start("first"), "1|22023")
	call := second.start(start("second"))
	if call.waits(fmt.Sprintf("%d = any (pg_blocking_pids(%d))", first.pid, second.pid)) { // else it is a slow machine
		await(t, d, "clock_timestamp() > "+tick+"::timestamptz + interval '1 s'")
	}
	first.rollback()
	call.want("22023")
}

func TestBadInputOfRunsIsNamed(t *testing.T) {
	t.Parallel()
	d := install(t)
	for call, says := range map[string]string{
		"start_run(null, '1 day')":                                    "p_key must not be NULL",
		"start_run('', '1 day')":                                      "p_key must have 1 to 255",
		"start_run(repeat('k', 256), '1 day')":                        "p_key must have 1 to 255",
		"start_run('k', null)":                                        "p_period must not be NULL",
		"start_run('k', '0')":                                         "p_period must be between 1 ms and 36500 days",
		"start_run('k', '999 us')":                                    "p_period must be between 1 ms and 36500 days",
		"start_run('k', '36501 days')":                                "p_period must be between 1 ms and 36500 days",
		"start_run('k', '1 month')":                                   "without months, it is 1 mon",
		"start_run('k', '1 year')":                                    "without months, it is 1 year",
		"start_run('k', '1 h', '0', 'UTC', 'later')":                  "p_first must be now or next",
		"start_run('k', '1 h', '0', 'UTC', null)":                     "p_first must be now or next",
		"list_runs('')":                                               "p_key must have 1 to 255",
		"list_runs(null, 0)":                                          "p_limit must be between 1 and 10000",
		"list_runs(null, null)":                                       "p_limit must be between 1 and 10000",
		"start_run('k', '1 h', null)":                                 "p_offset must be at least 0 and less than p_period, it is NULL",
		"start_run('k', '1 h', '-1 s')":                               "p_offset must be at least 0",
		"start_run('k', '1 h', '60 min')":                             "p_offset must be at least 0",
		"start_run('k', '1 day', '0', null)":                          "p_time_zone must not be NULL",
		"start_run('k', '1 day', '0', 'Europe/Berli')":                "Europe/Berli",
		"start_run('k', '36 h', '0', 'Europe/Berlin')":                "p_time_zone is 'Europe/Berlin', but p_period, 36:00:00, is not a number of whole days",
		"start_run_at('k', null)":                                     "p_slot must be a finite time, it is NULL",
		"start_run_at('k', 'infinity')":                               "p_slot must be a finite time, it is infinity",
		"start_run_at('k', '-infinity')":                              "p_slot must be a finite time",
		"start_run_at('k', now() - interval '169 h')":                 "is older than what is kept, 7 days",
		"start_run_at('k', now() + interval '169 h')":                 "is further ahead than runs are kept, 7 days",
		"pgxlock_due_runs('k', '1 h', '0', 'UTC', -1, false)":         "p_missed must be between 0 and 1000",
		"pgxlock_due_runs('k', '1 h', '0', 'UTC', 1001, false)":       "p_missed must be between 0 and 1000",
		"pgxlock_finish_run('k', now(), 'h', 'over', null)":           "p_state succeeded, failed or withdrawn, it is over",
		"pgxlock_start_run('k',now(),null,null,null,'0','h',null)":    "p_keep must be more than 0",
		"pgxlock_start_run('k',now(),null,null,null,'1 day','',null)": "p_holder must have 1 to 255",
	} {
		_, err := d.query(call)
		if outcome("", err) != "22023" || !strings.Contains(fmt.Sprint(err), says) {
			t.Errorf("%s: %v, want that %s", call, err, says)
		}
	}
	d.want("select count(*) from pgxlock_runs", "0")
}

// A caller whose answer was lost asks again. Meanwhile the run is forgotten, or another
// caller that has the lease now takes it over: then it is no longer the first caller's.
func TestRepeatedStartHasItsRunOnlyWhileItIsItsOwn(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	start := func(holder, lease string) string {
		return "(select attempt from pgxlock_start_run('k', current_date, null, null, null, '7 days', " + quote(holder) + ", " + lease + "))"
	}
	d.want(start("A", "null"), "1")
	d.want(start("A", "null"), "1")
	other, again := d.sessions()
	other.begin(readCommitted)
	other.want("forget_run('k', current_date)", "true")
	call := again.start(start("A", "null"))
	call.waitsFor(other)
	other.commit()
	call.want("NULL")
	d.want(start("B", "null"), "1")
	d.want(start("A", "null"), "NULL")

	d.do("delete from pgxlock_runs; select acquire_lock('run', 'A')")
	d.want(start("A", "'run'"), "1")
	d.want(start("A", "'run'"), "1")
	d.expire("run")
	d.want(start("A", "'run'"), "LK001")
	d.want("acquire_lock('run', 'B')", "true")
	other.begin(readCommitted)
	other.want(start("B", "'run'"), "2")
	again.want(start("A", "'run'"), "LK001") // what B does has not committed
	other.commit()
	again.want(start("A", "'run'"), "LK001")
	d.want("select holder || attempt from pgxlock_runs", "B2")
}
