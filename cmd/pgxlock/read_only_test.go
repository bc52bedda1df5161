//go:build unix

package main

import (
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// readOnly makes the transactions of a connection string read-only by default, as a provider does
// with a database whose disk is nearly full.
func readOnly(url string) string { return url + "&options=-c%20default_transaction_read_only%3Don" }

func TestCommandsWriteWhereTransactionsAreReadOnlyByDefault(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	url := readOnly(db.URL)
	on := func(args ...string) result { return execute(t, []string{"DATABASE_URL=" + url}, args...) }
	acquired := on("acquire", "k", "--holder", "me")
	acquired.want(t, exitOK, " me\n", "")
	token, _, _ := strings.Cut(acquired.stdout, " ")
	on("extend", "k", "--holder", "me", "--token", token, "--ttl", "1h").want(t, exitOK, "T", "")
	on("ls").want(t, exitOK, "me", "")
	on("step-down", "k").want(t, exitOK, "asked the holder of", "")
	on("release", "k", "--holder", "me", "--token", token).want(t, exitOK, "", "")
	on("acquire", "k", "--holder", "you").want(t, exitOK, " you\n", "")
	on("evict", "k", "--yes", "--reason", "why").want(t, exitOK, `evicted: lease "k" from you`, "")
	on("evictions").want(t, exitOK, "why", "")
	on("reap").want(t, exitOK, "nothing to remove", "")
	db.Exec(t, "select claim_once('old'); update pgxlock_claims set claimed_at = now() - interval '31 days'")
	on("claims", "purge", "--older-than", "720h").want(t, exitOK, "removed 1 claim\n", "")
	on("migrate", "up").want(t, exitOK, "", "already current")

	// The user's word counts, and the error says what it means here.
	url += "&target_session_attrs=read-write"
	for _, command := range []string{"acquire k", "ls"} {
		r := on(strings.Fields(command)...)
		r.want(t, exitUnavailable, "", "its transactions are read-only, which target_session_attrs=read-write refuses; target_session_attrs=primary accepts the primary")
		if strings.Contains(r.stderr, "standby") {
			t.Errorf("%s calls a primary a standby: %s", command, r.stderr)
		}
	}
}

func TestCommandsConnectAgainWhereTransactionsAreReadOnlyByDefault(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	address := started(t, readOnly(db.URL))
	var all []*running
	for _, command := range []string{"run", "lead"} {
		r := startCommand(t, command, readOnly(db.URL), "echo ready; cat", append(roomy[:len(roomy):len(roomy)], "key of "+command)...)
		r.says(t, "ready")
		all = append(all, r)
	}
	testkit.Query[int](t, db, "select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database() and application_name like 'pgxlock%'")
	db.Exec(t, "update distributed_locks set expires_at = now() + interval '45 seconds'") // each renewal sets a minute
	pgtest.Until(t, "both leases are renewed", func() bool {
		return testkit.Query[int](t, db, "select count(*) from distributed_locks where expires_at > now() + interval '50 seconds'") == 2
	})
	pgtest.Until(t, "the page shows both", func() bool {
		_, body := fetch(t, address)
		return strings.Contains(body, "key of run") && strings.Contains(body, "key of lead")
	})
	for _, r := range all {
		_ = r.stdin.Close()
		r.ends(t, exitOK)
	}
	if left := testkit.Query[int](t, db, "select count(*) from lock_leases where state = 'live'"); left != 0 {
		t.Errorf("%d leases were not released", left)
	}
}
