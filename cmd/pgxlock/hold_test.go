package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"syscall"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

func TestScriptAcquiresExtendsAndReleases(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	on := func(args ...string) result { return execute(t, nil, append(args, "--database-url", db.URL)...) }
	acquired := on("acquire", "nightly", "--ttl", "5m", "--metadata", `it's "me"`)
	acquired.want(t, exitOK, ":", "")
	token, holder, ok := strings.Cut(strings.TrimSpace(acquired.stdout), " ")
	if !ok || token == "" || holder == "" || strings.Contains(holder, " ") {
		t.Fatalf("not a token and a holder: %q", acquired.stdout)
	}
	on("ls").want(t, exitOK, `it's "me"`, "")

	busy := on("acquire", "nightly", "--wait", "30ms")
	busy.want(t, exitBusy, "", holder)
	if busy.stdout != "" {
		t.Errorf("data of a lease that was not acquired: %q", busy.stdout)
	}
	on("extend", "nightly", "--holder", holder, "--token", token, "--ttl", "1h").want(t, exitOK, "T", "")
	on("extend", "nightly", "--holder", holder, "--token", "1").want(t, exitLost, "", "lost")
	on("release", "nightly", "--holder", holder, "--token", "1").want(t, exitLost, "", "lost")
	on("release", "nightly", "--holder", holder, "--token", token).want(t, exitOK, "", "")
	on("release", "nightly", "--holder", holder, "--token", token).want(t, exitLost, "", "lost")

	var l holding
	again := on("acquire", "nightly", "-o", "json", "--holder", "me")
	again.want(t, exitOK, "me", "")
	if err := json.Unmarshal([]byte(again.stdout), &l); err != nil || l.Holder != "me" || fmt.Sprint(l.Token) <= token || l.ExpiresAt.IsZero() {
		t.Errorf("%q: %v", again.stdout, err)
	}
}

func TestAcquireWaitsForTheHolder(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	db.Exec(t, "select acquire_lock('k', 'other', 3600)")
	ended := make(chan result, 1)
	go func() { ended <- execute(t, nil, "acquire", "k", "--wait", "1h", "--database-url", db.URL) }()
	pgtest.Until(t, "it has asked once", func() bool {
		return testkit.Query[int](t, db, "select count(*) from pg_stat_activity where datname = current_database() and application_name = 'pgxlock' and state = 'idle' and query like '%acquire%'") == 1
	})
	db.Exec(t, "update distributed_locks set expires_at = clock_timestamp()")
	pgtest.Receive(t, "it has the lease", ended).want(t, exitOK, ":", "")
}

func TestSignalLeavesNoLeaseThatNobodyKnows(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	for _, test := range []struct {
		args []string
		left int
	}{
		{nil, 0},
		{[]string{"--holder", "me"}, 1}, // may have been held before, and can be released
	} {
		tx, err := db.Pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(t.Context(), "lock table distributed_locks in access exclusive mode"); err != nil {
			t.Fatal(err)
		}
		ctx, signal := context.WithCancelCause(t.Context())
		root := newRoot()
		var stdout bytes.Buffer
		root.SetOut(&stdout)
		root.SetErr(io.Discard)
		ended := make(chan int, 1)
		go func() {
			ended <- run(ctx, root, append([]string{"acquire", "k", "--database-url", db.URL}, test.args...))
		}()
		for waits := false; !waits; {
			if err := db.Pool.QueryRow(t.Context(), "select exists (select from pg_locks where not granted and relation = 'distributed_locks'::regclass)").Scan(&waits); err != nil {
				t.Fatal(err)
			}
		}
		signal(interrupted{syscall.SIGTERM}) // what main makes of one
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		if code := <-ended; code != exitSignal+int(syscall.SIGTERM) || stdout.Len() > 0 {
			t.Errorf("%v: exit code %d, output %q", test.args, code, stdout.String())
		}
		var left int
		if err := db.Pool.QueryRow(t.Context(), "select count(*) from distributed_locks").Scan(&left); err != nil || left != test.left {
			t.Errorf("%v: %d leases are left, want %d: %v", test.args, left, test.left, err)
		}
	}
}

func TestMisuseOfLeasesOnTheCommandLineIsNamed(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	for _, test := range []struct {
		args []string
		says string
	}{
		{[]string{"acquire"}, "the key is missing: pgxlock acquire KEY (see"},
		{[]string{"acquire", "a", "b"}, "one key is expected, and not 2"},
		{[]string{"acquire", ""}, "pgxlock: the key must have 1 to 255 characters, it has 0\n"},
		{[]string{"acquire", "k", "--ttl", "-1s"}, "pgxlock: --ttl must be more than 0 and at most 100 years, it is -00:00:01\n"},
		{[]string{"acquire", "k", "--wait", "-1s"}, "--wait is -1s"},
		{[]string{"acquire", "k", "--holder", "*me"}, "--holder must not begin with *"},
		{[]string{"extend", "k", "--holder", "me"}, "token"},
		{[]string{"extend", "k", "--holder", "me", "--token", "x"}, `pgxlock: --token "x": use a whole number (see`},
		{[]string{"extend", "k", "--holder", "me", "--token", "9223372036854775808"}, `--token "9223372036854775808": it is out of range`},
		{[]string{"acquire", "k", "--ttl", "5x"}, `--ttl "5x": use a duration such as 90s, 1h30m, or 90 for seconds (see`},
		{[]string{"acquire", "k", "-o", "xml"}, `--output "xml": use table or json`},
		{[]string{"release", "k", "--token", "1"}, "holder"},
	} {
		execute(t, nil, append(test.args, "--database-url", db.URL)...).want(t, exitUsage, "", test.says)
	}
}
