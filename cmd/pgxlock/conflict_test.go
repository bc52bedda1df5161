//go:build unix

package main

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestDurationsAreAcceptedWithUnitsAndAsSeconds(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]time.Duration{
		"5": 5 * time.Second, "0": 0, "0.25": 250 * time.Millisecond, "-1": -time.Second, "90s": 90 * time.Second,
		"1h30m": 90 * time.Minute, "250ms": 250 * time.Millisecond, "-1s": -time.Second,
	} {
		var s seconds
		if err := s.Set(text); err != nil || time.Duration(s) != want {
			t.Errorf("%q: %s, want %s: %v", text, time.Duration(s), want, err)
		}
	}
	for _, text := range []string{"", "soon", "5 s", "s", "1d", "nan", "inf", "1e300", "99999999999"} {
		var s seconds
		if err := s.Set(text); !errors.Is(err, errNotADuration) {
			t.Errorf("%q: %s, %v", text, time.Duration(s), err)
		}
	}
}

func TestHelpShowsTheDefaultsOfDurations(t *testing.T) {
	t.Parallel()
	var d, none time.Duration
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	durationVar(flags, &d, "ttl", "", 30*time.Second, "how long")
	durationVar(flags, &none, "wait", "w", 0, "how long")
	if usage := flags.FlagUsages(); !strings.Contains(usage, "--ttl duration    how long (default 30s)\n") || !strings.Contains(usage, "-w, --wait duration   how long\n") {
		t.Error(usage)
	}
	if d != 30*time.Second {
		t.Errorf("the default is %s", d)
	}
}

// The short flags mean what they mean to flock(1).
func TestRunTakesTheShortFlagsOfFlock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	db.Exec(t, "select acquire_lock('k', 'somebody', 3600)")
	on := func(args string) result {
		return answered(t, strings.Fields("run --database-url "+db.URL+" "+args)...)
	}
	for _, test := range []struct {
		args           string
		code           int
		stdout, stderr string
	}{
		{"-n k -- echo ran", exitBusy, "", "held by somebody"},
		{"k -n -E 1 -- echo ran", 1, "", "held by somebody"},
		{"-nE0 k -- echo ran", 0, "", "held by somebody"},
		{"-w 5.5 -E 9 k -- echo ran", 9, "", "held by somebody"},
		{"-w0 k -- echo ran", exitBusy, "", "held by somebody"},
		{"-n -q k -- echo ran", exitBusy, "", ""},
		{"-nqE 0 k -- echo ran", 0, "", ""},
		{"-n -s k -- echo ran", exitBusy, "", "held by somebody"},
		{"-n -E 9 free -- echo ran", exitOK, "ran\n", ""},
		{"-n -E 9 --ttl 5 free -- sh -c exit\t75", 75, "", ""}, // of the command
		{"-n -E 256 k -- echo ran", exitUsage, "", "--conflict-exit-code is 256, it must be between 0 and 255"},
		{"-n -E -1 k -- echo ran", exitUsage, "", "--conflict-exit-code is -1, it must be between 0 and 255"},
		{"-n -w 1 k -- echo ran", exitUsage, "", "--wait and --no-wait exclude each other; leave one out"},
		{"-E x k -- echo ran", exitUsage, "", `--conflict-exit-code "x": use a whole number`},
	} {
		args := strings.Fields("run --database-url " + db.URL + " " + strings.ReplaceAll(test.args, "\t", "\x00"))
		for i := range args {
			args[i] = strings.ReplaceAll(args[i], "\x00", " ")
		}
		r := answered(t, args...)
		r.want(t, test.code, test.stdout, test.stderr)
		if strings.Count(strings.TrimPrefix(r.stderr, "pgxlock: waiting for "), "pgxlock: ") > 1 {
			t.Errorf("%s: more than one line: %q", test.args, r.stderr)
		}
	}
	shared := startRun(t, db.URL, "echo ready; cat >/dev/null", "-s", "s")
	shared.says(t, "ready")
	on("-n -s s -- echo ran").want(t, exitOK, "ran\n", "")
	on("-n s -- echo ran").want(t, exitBusy, "", "not acquired")
	on("-n -E 7 --kind advisory s -- echo ran").want(t, exitOK, "ran\n", "")
}

func TestAcquireTakesTheShortFlagsOfFlock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	db.Exec(t, "select acquire_lock('k', 'somebody', 3600)")
	for _, test := range []struct {
		args   string
		code   int
		stderr string
	}{
		{"-n k", exitBusy, `pgxlock: acquire "k": held by somebody for another `},
		{"k", exitBusy, "; try again later, or wait longer with --wait\n"},
		{"-w 0.1 -E 3 k", 3, "held by somebody"},
		{"-q -E 3 k", 3, ""},
		{"-q -E 300 k", exitUsage, "--conflict-exit-code is 300"},
		{"-n -w 1 k", exitUsage, "--wait and --no-wait exclude each other"},
	} {
		execute(t, nil, strings.Fields("acquire --database-url "+db.URL+" "+test.args)...).want(t, test.code, "", test.stderr)
	}
	execute(t, nil, "acquire", "--database-url", db.URL, "-n", "-E", "3", "--holder", "me", "free", "--ttl", "5").want(t, exitOK, " me\n", "")
}
