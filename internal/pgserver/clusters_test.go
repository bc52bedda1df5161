//go:build !windows

package pgserver

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// countedInitdb makes programs of which initdb writes down each call, and makes a cluster of one
// file. Any user can run them.
func countedInitdb(t *testing.T) (bin Binaries, calls func() int) {
	t.Helper()
	dir := openTempDir(t)
	log := filepath.Join(dir, "calls")
	bin = Binaries{Dir: fakeBinaries(t, dir, "15.1"), Version: "15.1"}
	script := "#!/bin/sh\necho called >> " + log + "\nwhile [ \"$1\" != --pgdata ]; do shift; done\nsleep 0.1\necho made > \"$2/PG_VERSION\"\n"
	if err := errors.Join(os.WriteFile(log, nil, 0o666), os.Chmod(log, 0o666), os.WriteFile(bin.tool("initdb"), []byte(script), 0o755)); err != nil {
		t.Fatal(err)
	}
	return bin, func() int {
		text, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(text), "called")
	}
}

// Each Clusters is here what another process has: what keeps them apart are files.
func TestProcessesOfARunCopyOneCluster(t *testing.T) {
	t.Setenv(ClustersEnv, "")
	bin, calls := countedInitdb(t)
	t.Setenv(BinDirEnv, bin.Dir)
	remove, err := ShareClusters(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dir := os.Getenv(ClustersEnv)
	nothing, err := ShareClusters(t.Context())
	if err == nil {
		err = nothing()
	}
	if err != nil || os.Getenv(ClustersEnv) != dir || gone(dir) {
		t.Errorf("a second program that shares clusters has made or removed some: %v", err)
	}

	passwords := make(map[string]bool)
	var mu sync.Mutex
	var processes sync.WaitGroup
	for i := range 6 {
		processes.Go(func() {
			var clusters Clusters
			cfg := Config{Binaries: bin, Clusters: &clusters}
			if i%2 > 0 {
				cfg.InitdbArgs = []string{"--data-checksums"}
			}
			s, err := prepareServer(t.Context(), cfg)
			if err == nil {
				err = s.makeCluster(t.Context())
			}
			if err != nil {
				t.Error(err)
				return
			}
			if made, err := os.ReadFile(filepath.Join(s.dir.data(), "PG_VERSION")); string(made) != "made\n" {
				t.Errorf("the copy is %q: %v", made, err)
			}
			mu.Lock()
			passwords[s.password] = true
			mu.Unlock()
			if err := errors.Join(s.dir.remove(), clusters.Remove()); err != nil {
				t.Error(err)
			}
		})
	}
	processes.Wait()
	if n := calls(); n != 2 || len(passwords) != 2 {
		t.Errorf("initdb was called %d times, and there are %d passwords; want one for each of two sets of arguments", n, len(passwords))
	}
	left, err := filepath.Glob(filepath.Join(dir, "new*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left are %v, %v", left, err)
	}
	if err := remove(); err != nil || !gone(dir) || os.Getenv(ClustersEnv) != "" {
		t.Errorf("%s is there after its removal, or the variable is: %v", dir, err)
	}
}

// The next process makes what a failed initdb has not.
func TestClusterThatCannotBeMadeIsNotShared(t *testing.T) {
	t.Setenv(ClustersEnv, "")
	bin, _ := countedInitdb(t)
	t.Setenv(BinDirEnv, bin.Dir)
	remove, err := ShareClusters(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := remove(); err != nil {
			t.Error(err)
		}
	}()
	good, err := os.ReadFile(bin.tool("initdb"))
	if err != nil {
		t.Fatal(err)
	}
	for _, script := range []string{"#!/bin/sh\necho no room\nexit 1\n", string(good)} {
		if err := os.WriteFile(bin.tool("initdb"), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		var clusters Clusters
		s, err := prepareServer(t.Context(), Config{Binaries: bin, Clusters: &clusters})
		if err != nil {
			t.Fatal(err)
		}
		err = s.makeCluster(t.Context())
		if failed := script != string(good); failed != (err != nil) || failed && !strings.Contains(err.Error(), "no room") {
			t.Errorf("initdb fails: %t; %v", failed, err)
		}
		if err := s.dir.remove(); err != nil {
			t.Error(err)
		}
	}
}
