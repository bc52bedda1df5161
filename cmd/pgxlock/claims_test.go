package main

import (
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestClaimsPurgeRemovesOldClaimsAndSaysHowMany(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	env := []string{"DATABASE_URL=" + db.URL}
	db.Exec(t, `select claim_once('new'), claim_once('old'), claim_once('older'), claim_once('kept', p_retention => '100 days'), claim_once('over', p_retention => '1 day');
		update pgxlock_claims set claimed_at = now() - interval '31 days' where claim_key in ('old', 'older', 'kept', 'over');
		update pgxlock_claims set expires_at = now() - interval '1 minute' where claim_key = 'over'`)
	left := func(want int) {
		t.Helper()
		var got int
		if err := db.Pool.QueryRow(t.Context(), "select count(*) from pgxlock_claims").Scan(&got); err != nil || got != want {
			t.Errorf("%d claims are left, want %d: %v", got, want, err)
		}
	}
	execute(t, env, "claims", "purge", "--older-than", "720h", "--dry-run").want(t, exitOK, "would remove 3 claims\n", "")
	execute(t, env, "claims", "purge", "--older-than", "720h", "--dry-run", "-o", "json").want(t, exitOK, "{\n  \"would_remove\": 3\n}\n", "")
	execute(t, env, "claims", "purge").want(t, exitUsage, "", "--older-than is missing; say how old claims must be")
	execute(t, env, "claims", "purge", "--older-than", "0").want(t, exitUsage, "", "--older-than is 0s, it must be more than 0")
	execute(t, env, "claims", "purge", "--older-than", "-1h").want(t, exitUsage, "", "--older-than is -1h, it must be more than 0")
	execute(t, env, "claims").want(t, exitUsage, "", `"pgxlock claims" needs a command: purge`)
	left(5)
	execute(t, env, "claims", "purge", "--older-than", "720h", "-o", "json").want(t, exitOK, "{\n  \"removed\": 3\n}\n", "")
	left(2)
	execute(t, env, "claims", "purge", "--older-than", "720h").want(t, exitOK, "nothing to remove\n", "")
	db.Exec(t, "update pgxlock_claims set claimed_at = now() - interval '31 days'")
	execute(t, env, "claims", "purge", "--older-than", "720h").want(t, exitOK, "removed 1 claim\n", "")
	left(1)
}

func TestClaimsPurgeSaysWhatIsInTheWay(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	env := []string{"DATABASE_URL=" + empty(t).URL}
	execute(t, env, "claims", "purge", "--older-than", "1h").want(t, exitInternal, "", "pgxlock migrate up")
	execute(t, env, "claims", "purge", "--older-than", "1h", "--dry-run", "--schema", "public").want(t, exitInternal, "", `schema "public" has no pgxlock`)
	denied := as("pg_monitor", migrated(t))
	execute(t, denied, "claims", "purge", "--older-than", "1h").want(t, exitDenied, "", "(SQLSTATE 42501)")
}
