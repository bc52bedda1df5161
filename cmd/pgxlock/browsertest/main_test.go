package browsertest

import (
	"bufio"
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	cdplog "github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

const (
	// chromiumEnv names the browser.
	chromiumEnv = "PGXLOCK_TEST_CHROMIUM"

	// picturesEnv names the directory into which the tests put pictures of the page, if it is set.
	picturesEnv = "PGXLOCK_TEST_PICTURES"

	// commandEnv names the program pgxlock.
	commandEnv = "PGXLOCK_TEST_COMMAND"
)

// chromium returns the browser, or skips the test, which is a long one.
func chromium(t *testing.T) string {
	t.Helper()
	pgtest.Long(t)
	for _, name := range []string{os.Getenv(chromiumEnv), "chromium-headless-shell", "chromium"} {
		if name != "" {
			if path, err := exec.LookPath(name); err == nil {
				return path
			}
		}
	}
	pgtest.Missing(t, "browser", fmt.Sprintf("scripts/chromium-tree gets Chromium from Debian's packages, %s names it", chromiumEnv))
	return ""
}

// serve starts pgxlock serve on a database, and returns the address of its page.
func serve(t *testing.T, url string, env []string, args ...string) string {
	t.Helper()
	program := os.Getenv(commandEnv)
	if program == "" {
		t.Fatalf("%s is not set: make build builds bin/pgxlock, and make test names it", commandEnv)
	}
	if _, err := os.Stat(program); err != nil {
		t.Fatalf("%v: run make build; %s names the program by an absolute path", err, commandEnv)
	}
	cmd := exec.Command(program, append([]string{"serve", "--listen", "127.0.0.1:0", "--every", "1"}, args...)...)
	cmd.Env = append(os.Environ(), append([]string{"DATABASE_URL=" + url, "PGXLOCK_DATABASE_URL="}, env...)...)
	said, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(said)
	address := ""
	for address == "" && lines.Scan() {
		if _, rest, found := strings.Cut(lines.Text(), "serving "); found {
			address, _, _ = strings.Cut(rest, " ")
		} else {
			t.Log(lines.Text())
		}
	}
	rest := make(chan struct{})
	go func() {
		defer close(rest)
		for lines.Scan() {
			t.Log(lines.Text())
		}
	}()
	t.Cleanup(func() {
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		<-rest
		if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 128+int(syscall.SIGTERM) {
			t.Errorf("pgxlock serve: %v", err)
		}
	})
	if address == "" {
		t.Fatal("pgxlock serve says no address")
	}
	return address
}

// A tab is a browser with one page, which fails the test for each error in its console.
type tab struct {
	t        *testing.T
	ctx      context.Context
	expected string // what errors may have in them
}

func open(t *testing.T, options ...chromedp.ExecAllocatorOption) *tab {
	t.Helper()
	options = append(append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(chromium(t)), chromedp.NoSandbox,
		chromedp.WindowSize(1280, 800), chromedp.Flag("hide-scrollbars", true), chromedp.Flag("disable-dev-shm-usage", true)), options...)
	browser, cancel := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(cancel)
	ctx, cancel := chromedp.NewContext(browser)
	t.Cleanup(cancel)
	var mu sync.Mutex
	var errs []string
	chromedp.ListenTarget(ctx, func(event any) {
		mu.Lock()
		defer mu.Unlock()
		switch e := event.(type) {
		case *runtime.EventConsoleAPICalled:
			errs = append(errs, fmt.Sprint("the console: ", e.Type, e.Args))
		case *runtime.EventExceptionThrown:
			errs = append(errs, e.ExceptionDetails.Error())
		case *cdplog.EventEntryAdded:
			if e.Entry.Level == cdplog.LevelInfo || e.Entry.Level == cdplog.LevelVerbose {
				break // as that a field has the focus already, because the test was faster
			}
			errs = append(errs, fmt.Sprintf("%s %s: %s", e.Entry.Level, e.Entry.URL, e.Entry.Text))
		}
	})
	b := &tab{t: t, ctx: ctx}
	if err := chromedp.Run(ctx, cdplog.Enable()); err != nil { // the browser lives as long as this context
		t.Fatal(err)
	}
	t.Cleanup(func() {
		mu.Lock()
		said := slices.Clone(errs)
		mu.Unlock() // the browser may have more to say
		for _, err := range said {
			if b.expected == "" || !strings.Contains(err, b.expected) {
				t.Error(err)
			}
		}
		if t.Failed() {
			var text string
			ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
			defer cancel()
			if err := chromedp.Run(ctx, chromedp.Evaluate(`document.body.innerText`, &text)); err == nil {
				t.Logf("the page was:\n%s", text)
			}
		}
	})
	return b
}

func (b *tab) do(actions ...chromedp.Action) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, pgtest.Patience)
	defer cancel()
	if err := chromedp.Run(ctx, actions...); err != nil {
		b.t.Fatal(err)
	}
}

// arrives waits until the page that has this element is drawn: before that the browser drops
// clicks and keys.
func (b *tab) arrives(element string) {
	b.t.Helper()
	b.do(chromedp.WaitVisible(element))
	pgtest.Until(b.t, "the page with "+element+" is drawn", func() bool {
		return value[bool](b, `performance.getEntriesByName("first-contentful-paint").length > 0`)
	})
}

// until waits for a JavaScript expression to be true.
func (b *tab) until(expression string) {
	b.t.Helper()
	b.do(chromedp.Poll(expression, nil, chromedp.WithPollingInterval(50*time.Millisecond), chromedp.WithPollingTimeout(pgtest.Patience)))
}

// shows waits for a text on the page.
func (b *tab) shows(text string) {
	b.t.Helper()
	b.until(fmt.Sprintf("document.body.innerText.includes(%q)", text))
}

// lacks waits until a text is no longer on the page.
func (b *tab) lacks(text string) {
	b.t.Helper()
	b.until(fmt.Sprintf("!document.body.innerText.includes(%q)", text))
}

// follows waits until the page follows the server.
func (b *tab) follows() {
	b.t.Helper()
	b.until(`document.getElementById("live").className === "on"`)
}

// changes waits until the server has sent the page anew.
func (b *tab) changes() {
	b.t.Helper()
	b.do(chromedp.Evaluate(`window.shown = document.getElementById("plots")`, nil))
	b.until(`!window.shown.isConnected`)
}

// value returns what an expression is.
func value[T any](b *tab, expression string) (v T) {
	b.t.Helper()
	b.do(chromedp.Evaluate(expression, &v))
	return v
}

// contrast is what WCAG asks of texts, and returns those that have less.
//
//go:embed contrast.js
var contrast string

// legible fails the test for each text that has too little contrast.
func (b *tab) legible() {
	b.t.Helper()
	for _, text := range value[[]string](b, contrast) {
		b.t.Errorf("little contrast: %s", text)
	}
}

// picture puts a picture of the page into the directory for pictures, if there is one.
func (b *tab) picture(name string) {
	b.t.Helper()
	dir := os.Getenv(picturesEnv)
	if dir == "" {
		return
	}
	var png []byte
	b.do(chromedp.CaptureScreenshot(&png))
	if err := os.WriteFile(filepath.Join(dir, "serve-"+name+".png"), png, 0o644); err != nil {
		b.t.Fatal(err)
	}
}
