package documents

import (
	"fmt"
	"os"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// TestMain runs the tests in the root directory of the repository, because the documents name
// files relative to it.
func TestMain(m *testing.M) {
	if err := os.Chdir("../.."); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	pgtest.Main(m)
}
