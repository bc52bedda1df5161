package withserver

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/pgxlock/pgxlock/internal/pgserver"
)

// limits are the most that a run may use; zero is no limit.
type limits struct{ servers, connections, databases int }

// set reads limits as --most has them.
func (l *limits) set(text string) error {
	names := map[string]*int{"servers": &l.servers, "connections": &l.connections, "databases": &l.databases}
	for part := range strings.SplitSeq(text, ",") {
		name, number, _ := strings.Cut(part, "=")
		n, err := strconv.Atoi(number)
		if names[name] == nil || err != nil || n <= 0 {
			return fmt.Errorf("%q is none of servers=N, connections=N and databases=N", part)
		}
		*names[name] = n
	}
	return nil
}

// exceeded returns an error that names what was too much.
func (l *limits) exceeded(used pgserver.Counts) error {
	var errs []error
	for _, one := range []struct {
		what       string
		used, most int
	}{{"servers", used.Servers, l.servers}, {"connections", used.Connections, l.connections}, {"databases", used.Databases, l.databases}} {
		if one.most > 0 && one.used > one.most {
			errs = append(errs, fmt.Errorf("the tests used %d %s, and may use %d: see \"What tests may cost\" in CONTRIBUTING.md", one.used, one.what, one.most))
		}
	}
	return errors.Join(errs...)
}

// counted runs run, prints what it used, and returns its code, or 1 if it was too much. Where the
// variable is set already the program that set it counts.
func (p program) counted(run func() int) (code int) {
	if os.Getenv(pgserver.CountsEnv) != "" {
		return run()
	}
	file, err := os.CreateTemp("", "pgxlock-counts-")
	if err == nil {
		defer func() { _ = errors.Join(os.Unsetenv(pgserver.CountsEnv), os.Remove(file.Name())) }()
		err = errors.Join(file.Close(), os.Chmod(file.Name(), 0o666), os.Setenv(pgserver.CountsEnv, file.Name())) // tests may run as other users
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "with:", err)
		return 1
	}
	code = run()
	used, err := pgserver.ReadCounts(file.Name())
	if err == nil {
		err = p.most.exceeded(used)
	}
	for _, line := range used.Skipped {
		fmt.Fprintln(os.Stderr, "skipped:", line)
	}
	fmt.Fprintf(os.Stderr, "%s; %s\n", &used, processorTime())
	if err != nil {
		fmt.Fprintln(os.Stderr, "with:", err)
		return max(code, 1)
	}
	return code
}
