package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// started starts pgxlock serve until the test is over, and returns the address of its page.
func started(t *testing.T, url string) string {
	t.Helper()
	return servedBy(t, program(t, []string{"DATABASE_URL=" + url}, "serve", "--listen", "127.0.0.1:0"))
}

// servedBy starts that command until the test is over, and returns the address of its page.
func servedBy(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait() // it was ended
	})
	return regexp.MustCompile(`http://[0-9.:]+/`).FindString(line(bufio.NewReader(stderr)))
}

func TestServeShowsThePageAndTheMetricsOfTheDatabase(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	db.Exec(t, `select acquire_lock('the key', 'the holder', 3600), acquire_lock('the import', 'the dead', 3600);
		update distributed_locks set acquired_at = now() - interval '3 days', expires_at = now() - interval '2 days' where holder_id = 'the dead'`)
	db.Exec(t, `select start_run('the job', interval '1 day'); update pgxlock_runs set state = 'failed', error = 'the reason', finished_at = now()`)
	db.Exec(t, `alter table pgxlock_since_crash set logged`)
	address := started(t, db.URL)
	for path, want := range map[string][]string{
		"": {
			"<title>pgxlock · " + db.Name, "the key", "the holder", "<strong>abandoned leases: 1</strong>", "<strong>stopped runs: 1</strong>", ">the job<", ">failed<", ">the reason<",
			"<strong>doctor: schema</strong>", "pgxlock_since_crash", "→ ALTER TABLE",
		},
		"api/snapshot": {`"runs":[{"key":"the job"`},
		"metrics":      {"pgxlock_collector_up 1\n", `pgxlock_holders{kind="lease",mode="exclusive"} 1` + "\n", `pgxlock_check_status{check="tokens"} 0` + "\n", "go_goroutines "},
		"readyz":       {""},
		"livez":        {""},
	} {
		for _, text := range want {
			var code int
			pgtest.Until(t, fmt.Sprintf("/%s has %q", path, text), func() (has bool) { // a reading has 5 s, which a busy machine may exceed
				var body string
				code, body = fetch(t, address+path)
				return strings.Contains(body, text)
			})
			if code != http.StatusOK {
				t.Errorf("/%s: %d", path, code)
			}
		}
	}
}

// What cannot be read is no count of 0 in the metrics, and has a name in the JSON.
func TestServeNamesWhatItsRoleCannotRead(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	url, _ := strings.CutPrefix(as("pg_monitor", withLeases(t))[0], "DATABASE_URL=")
	address := started(t, url)
	for path, want := range map[string]string{"api/snapshot": `"unread":["leases","queues","evictions","runs"]`, "metrics": `pgxlock_holders{kind="advisory"`, "": "public.grant_locks(&#39;pg_monitor&#39;, &#39;monitoring&#39;)"} {
		var body string
		pgtest.Until(t, fmt.Sprintf("/%s has %q", path, want), func() bool { // a reading has 5 s, which a busy machine may exceed
			_, body = fetch(t, address+path)
			return strings.Contains(body, want)
		})
		for _, zero := range []string{`kind="lease"`, "pgxlock_waiters{", "pgxlock_expired_leases{", "pgxlock_tokens_used_ratio "} {
			if strings.Contains(body, zero) {
				t.Errorf("/%s has %q:\n%s", path, zero, body)
			}
		}
	}
}

// fetch gets what a server answers.
func fetch(t *testing.T, address string) (code int, body string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(text)
}

// fields are the names that JSON has for a type, and for what is in it.
func fields(of reflect.Type, found map[string]bool) {
	for of.Kind() == reflect.Slice {
		of = of.Elem()
	}
	if of.Kind() != reflect.Struct || of == reflect.TypeFor[time.Time]() {
		return
	}
	for i := range of.NumField() {
		field := of.Field(i)
		if name, _, _ := strings.Cut(field.Tag.Get("json"), ","); name != "" {
			found[name] = true
		}
		fields(field.Type, found)
	}
}

func TestJSONOfTheSnapshotIsDocumented(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/serve.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(page), "\n## JSON\n")
	if !found {
		t.Fatal("docs/serve.md does not describe the JSON")
	}
	section, _, _ = strings.Cut(section, "\n## ")
	documented := make(map[string]bool)
	for _, row := range regexp.MustCompile(`(?m)^\| ([^|]+) \|`).FindAllStringSubmatch(section, -1) {
		for _, name := range regexp.MustCompile("`([a-z_]+)`").FindAllStringSubmatch(row[1], -1) {
			documented[name[1]] = true
		}
	}
	has := make(map[string]bool)
	fields(reflect.TypeFor[servedView](), has)
	for name := range has {
		if !documented[name] {
			t.Errorf("docs/serve.md lacks %s", name)
		}
	}
	for name := range documented {
		if !has[name] {
			t.Errorf("docs/serve.md has %s, which there is not", name)
		}
	}
}

func TestServeCutsOffARequestThatDoesNotEnd(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	address := started(t, "postgres://alice@127.0.0.1:1/shop")
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.Trim(strings.TrimPrefix(address, "http:"), "/"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: localhost\r\nX-Never: "); err != nil {
		t.Fatal(err)
	}
	if said, err := io.ReadAll(conn); err != nil || strings.Contains(string(said), "200 OK") { // it ends when the server closes it
		t.Errorf("%q, %v", said, err)
	}
}

func TestServeRefusesAShortToken(t *testing.T) {
	t.Parallel()
	const remedy = ", so that nobody guesses it; set $PGXLOCK_SERVE_TOKEN or --token-file, for example to the output of openssl rand -hex 16\n"
	const nowhere = "--listen=unix:/nowhere/socket" // it ends there with a token that is long enough
	execute(t, []string{tokenVariable + "=short"}, "serve", nowhere).want(t, exitUsage, "", "pgxlock: the token of $PGXLOCK_SERVE_TOKEN has 5 characters, it must have at least 32"+remedy)

	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(strings.Repeat("f", 31)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	execute(t, nil, "serve", nowhere, "--token-file", file).want(t, exitUsage, "", "pgxlock: the token of --token-file "+file+" has 31 characters, it must have at least 32"+remedy)
}

func TestSystemdUnitStartsServeWithFlagsThatItHas(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	unit, err := os.ReadFile("../../deploy/pgxlock-serve.service")
	if err != nil {
		t.Fatal(err)
	}
	start := regexp.MustCompile(`(?m)^ExecStart=/usr/local/bin/pgxlock (.+)$`).FindSubmatch(unit)
	if start == nil {
		t.Fatalf("it starts no pgxlock:\n%s", unit)
	}
	executeHere(t, "", append(strings.Fields(string(start[1])), "--help")...).want(t, 0, "pgxlock serve [flags]", "")

	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		pgtest.Missing(t, "systemd", "systemd-analyze verifies the unit")
	}
	// verify wants the program to be there.
	there := strings.ReplaceAll(string(unit), "/usr/local/bin/pgxlock", itself(t))
	file := filepath.Join(t.TempDir(), "pgxlock-serve.service")
	if err := os.WriteFile(file, []byte(there), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), analyze, "verify", file).CombinedOutput() // it may also complain of this system's units
	if strings.Contains(string(out), filepath.Base(file)) {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
}

func line(r *bufio.Reader) string {
	text, _ := r.ReadString('\n')
	return strings.TrimSuffix(text, "\n")
}
