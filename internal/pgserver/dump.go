package pgserver

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"slices"
	"strings"
)

// Dump returns the definitions in a database as pg_dump writes them, without
// what differs from one run to the next. arg goes to pg_dump.
func (s *Server) Dump(ctx context.Context, database string, arg ...string) (string, error) {
	cmd := exec.CommandContext(ctx, s.cfg.Binaries.tool("pg_dump"), slices.Concat([]string{"--schema-only", "--dbname", s.URL(database)}, arg)...)
	cmd.Env = environment()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("pgserver: pg_dump: %w%s", err, quoted(stderr.String()))
	}
	var b strings.Builder
	for line := range strings.Lines(string(out)) {
		if !strings.HasPrefix(line, `\restrict `) && !strings.HasPrefix(line, `\unrestrict `) { // random words
			b.WriteString(line)
		}
	}
	return b.String(), nil
}
