package main

import (
	"bufio"
	"io"
	"net/http"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

func TestServeShowsThePageAndTheMetricsOfTheDatabase(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	db.Exec(t, "select acquire_lock('the key', 'the holder', 3600)")
	cmd := program(t, []string{"DATABASE_URL=" + db.URL}, "serve", "--listen", "127.0.0.1:0")
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
	address := regexp.MustCompile(`http://[0-9.:]+/`).FindString(line(bufio.NewReader(stderr)))
	for path, want := range map[string][]string{
		"":        {"the key", "the holder"},
		"metrics": {"pgxlock_collector_up 1\n", `pgxlock_holders{kind="lease",mode="exclusive"} 1` + "\n", "go_goroutines "},
		"readyz":  {""},
		"livez":   {""},
	} {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(response.Body)
		_ = response.Body.Close()
		if err != nil || response.StatusCode != http.StatusOK {
			t.Errorf("/%s: %s, %v", path, response.Status, err)
		}
		for _, text := range want {
			if !strings.Contains(string(body), text) {
				t.Errorf("/%s does not have %q: %s", path, text, body)
			}
		}
	}
}

func TestTheSystemdUnitStartsServeWithFlagsThatItHas(t *testing.T) {
	t.Parallel()
	unit, err := os.ReadFile("../../deploy/pgxlock-serve.service")
	if err != nil {
		t.Fatal(err)
	}
	start := regexp.MustCompile(`(?m)^ExecStart=/usr/local/bin/pgxlock (.+)$`).FindSubmatch(unit)
	if start == nil {
		t.Fatalf("it starts no pgxlock:\n%s", unit)
	}
	execute(t, nil, append(strings.Fields(string(start[1])), "--help")...).want(t, 0, "pgxlock serve [flags]", "")
}
