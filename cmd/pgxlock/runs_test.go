//go:build unix

package main

import (
	"encoding/json"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func runsAsJSON(t *testing.T, r result) (all []runView) {
	t.Helper()
	if err := json.Unmarshal([]byte(r.stdout), &all); err != nil || r.stderr != "" {
		t.Fatalf("%+v: %v", r, err)
	}
	return all
}

// What a second machine says of the run of a first one, and what it exits with.
func TestOnceSaysHowTheRunStands(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	first := startCommand(t, "once", db.URL, trapping("trap 'exit 0' TERM"), "--every", long, "k")
	first.says(t, "ready")
	onceOn(t, db, "echo ran").want(t, exitOK, "", `"k" was already started in this period of 3640d, and has not ended; if its process has died, pgxlock runs forget k --force lets it be started again`)
	r := onceOn(t, db, "echo ran", "-o", "json", "-E", "75")
	var view runView
	if err := json.Unmarshal([]byte(r.stdout), &view); err != nil || r.code != exitBusy || r.stderr != "" {
		t.Fatalf("%+v: %v", r, err)
	}
	if view.Key != "k" || view.State != "running" || view.Attempts != 1 || view.Retry || view.Holder == "" || !view.Finished.IsZero() || view.PeriodSeconds != (3640*24*time.Hour).Seconds() {
		t.Errorf("%+v", view)
	}
	first.signal(t, syscall.SIGTERM)
	first.ends(t, exitOK)
	onceOn(t, db, "echo ran").want(t, exitOK, "", "and has succeeded")
	onceOn(t, db, "echo ran", "-E", "75").want(t, exitBusy, "", "and has succeeded")
	onceOn(t, db, "echo ran", "-o", "json").want(t, exitOK, `"state": "succeeded"`, "")
	db.Exec(t, "update pgxlock_runs set state = 'failed', error = E'why\n'")
	onceOn(t, db, "echo ran").want(t, exitRunFailed, "", `and has failed: why\n; it starts again only after pgxlock runs forget k`)
	onceOn(t, db, "echo ran", "-o", "json").want(t, exitRunFailed, `"state": "failed"`, "")
	db.Exec(t, "delete from pgxlock_runs")
	onceOn(t, db, "echo ran", "--first", "next").want(t, exitOK, "", `"k" begins with the next period of 3640d, by --first next`)
	skipped := onceOn(t, db, "echo ran", "--first", "next", "-o", "json")
	if skipped.want(t, exitOK, `"state": "skipped"`, ""); strings.Contains(skipped.stdout, "started_at") {
		t.Errorf("a skipped run has started: %s", skipped.stdout)
	}
	execute(t, []string{"DATABASE_URL=" + db.URL}, "runs").want(t, exitOK, "skipped                           ", "") // STARTED AT and FINISHED AT are empty
	onceOn(t, db, "echo ran", "--first", "now").want(t, exitOK, "ran\n", "")
}

func TestRunsListsAndForgets(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	env := []string{"DATABASE_URL=" + db.URL}
	execute(t, env, "runs").want(t, exitOK, "KEY", "")
	execute(t, env, "runs", "-o", "json").want(t, exitOK, "[]\n", "")
	execute(t, env, "runs", "forget", "k").want(t, exitNoRun, "", `no such run of "k" is recorded`)
	execute(t, env, "runs", "forget", "k", "-o", "json").want(t, exitNoRun, "[]\n", `no such run of "k" is recorded`)
	db.Exec(t, `insert into pgxlock_runs values
		('a', '2026-03-01 00:00+00', 'failed', 2, 'pod-1:x', null, '2026-03-01 00:00:01+00', '2026-03-01 00:00:02+00', E'disk\nfull', 'infinity', '1 day', '3 h', 'Europe/Berlin'),
		('a', '2026-03-02 00:00+00', 'running', 1, 'pod-2:x', null, now(), null, null, 'infinity', '1 day', '3 h', 'Europe/Berlin'),
		('b', '2026-03-03 00:00:00.5+00', 'running', 3, 'pod-3:x', 'run:b', now(), null, null, 'infinity', null, null, null)`)
	all := runsAsJSON(t, execute(t, env, "runs", "-o", "json"))
	if len(all) != 3 || all[0].Key != "b" || all[0].State != "abandoned" || all[0].PeriodSeconds != 0 || !all[0].Retry || all[0].Attempts != 3 || all[1].State != "running" {
		t.Fatalf("%+v", all)
	}
	if a := all[2]; a.State != "failed" || a.Error != "disk\nfull" || a.Holder != "pod-1:x" || a.PeriodSeconds != 86400 || a.OffsetSeconds != 10800 || a.Zone != "Europe/Berlin" ||
		!a.Slot.Equal(time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)) || a.Finished.Sub(a.Started) != time.Second {
		t.Errorf("%+v", a)
	}
	for args, want := range map[string]int{"--key a": 2, "--state failed,abandoned": 2, "--limit 1": 1, "--state running --limit 1": 1, "--key c": 0} {
		if got := runsAsJSON(t, execute(t, env, append([]string{"runs", "-o", "json"}, strings.Fields(args)...)...)); len(got) != want {
			t.Errorf("%s: %+v, want %d", args, got, want)
		}
	}
	table := execute(t, env, "runs").stdout
	if lines := strings.Split(table, "\n"); len(lines) != 5 || !strings.Contains(strings.Join(strings.Fields(lines[0]), " "), "KEY RUN EVERY STATE STARTED AT FINISHED AT ATTEMPTS BY ERROR") ||
		!strings.Contains(lines[3], " 1d ") || !strings.Contains(lines[3], `disk\nfull`) {
		t.Errorf("%s", table)
	}

	execute(t, env, "runs", "forget", "a").want(t, exitBusy, "", "has not ended: if its process has died, add --force")
	execute(t, env, "runs", "forget", "a", "--run", "2026-03-01T01:00:00+01:00").want(t, exitOK, "(failed)", "")
	execute(t, env, "runs", "forget", "a", "--run", "2026-03-01T00:00:00Z").want(t, exitNoRun, "", "no such run")
	execute(t, env, "runs", "forget", "a", "--force").want(t, exitOK, "(running)", "")
	execute(t, env, "runs", "forget", "b", "--run", all[0].Slot.Format(time.RFC3339Nano), "-o", "json").want(t, exitOK, `"state": "abandoned"`, "")
	if left := runsOf(t, db); left != "" {
		t.Errorf("left: %s", left)
	}
}
