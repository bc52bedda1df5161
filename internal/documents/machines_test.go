package documents

import (
	"os"
	"os/exec"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// Users of machines with 32 bits run the tests there too.
func TestRootModuleCompilesFor32Bits(t *testing.T) {
	pgtest.Builds(t)
	t.Parallel()
	vet := exec.CommandContext(t.Context(), "go", "vet", "./...")
	vet.Env = append(os.Environ(), "GOARCH=386", "CGO_ENABLED=0")
	if output, err := vet.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, output)
	}
}
