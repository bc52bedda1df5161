package pgtest

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgserver"
)

// RequireEnv is the environment variable that lists, separated by commas, what the tests must
// not do without: pooler, browser, languages, tmux, versions, and other names that Missing is
// called with.
const RequireEnv = "PGXLOCK_TEST_REQUIRE"

// Missing skips the test because this machine lacks something that it needs, and fails it
// instead where RequireEnv lists that. The reason says where the missing thing can be had.
func Missing(tb testing.TB, what string, reason any) {
	tb.Helper()
	if required(what) {
		tb.Fatalf("%s requires %q, which is missing: %v", RequireEnv, what, reason)
	}
	if err := (&pgserver.Counts{Skipped: []string{fmt.Sprintf("%s: %s is missing: %v", tb.Name(), what, reason)}}).Report(); err != nil {
		tb.Errorf("pgtest: %v", err)
	}
	tb.Skipf("%s is missing: %v", what, reason)
}

// Builds skips a test whose subject is a build, a release or a document, but where make lint runs it:
// make test compiles nothing but tests.
func Builds(tb testing.TB) {
	tb.Helper()
	if os.Getenv("PGXLOCK_TEST_BUILDS") == "" {
		tb.Skip("make lint runs it, with PGXLOCK_TEST_BUILDS=1")
	}
}

func required(what string) bool {
	return slices.Contains(strings.Split(os.Getenv(RequireEnv), ","), what)
}
