//go:build unix

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/oneline"
)

// A healthFile says who leads, and is there exactly while this process does. The leader has it
// locked against writing, so that one can be told from a file that a killed leader left: unlike
// flock(2), that takes a right to write, so users that only read it can keep no leader from it. The
// lock ends when its process closes any descriptor of the file. The methods of a nil one do nothing.
type healthFile struct {
	path, content string   // content is empty while the file is not there
	locked        *os.File // nil in the watcher
}

// healthReport is what the file has.
type healthReport struct {
	Key    string `json:"key"`
	Holder string `json:"holder"`
	Token  int64  `json:"token"`
}

// newHealthFile removes what an earlier leader left, and makes sure that the file can be made.
func newHealthFile(path string) (*healthFile, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	h := &healthFile{path: path}
	if err := h.clear(); err != nil {
		return nil, err
	}
	file, err := h.make()
	if err != nil {
		return nil, err
	}
	return h, errors.Join(file.Close(), os.Remove(file.Name()))
}

// clear removes the file if a leader left it that is gone.
func (h *healthFile) clear() error {
	file, err := os.OpenFile(h.path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }() // it was only read
	var left healthReport
	text, err := io.ReadAll(io.LimitReader(file, 1<<16))
	if err != nil || json.Unmarshal(text, &left) != nil || left.Key == "" || left.Holder == "" {
		return errors.New(h.path + " exists, and no pgxlock lead has made it; name another file")
	}
	lock := syscall.Flock_t{Type: syscall.F_RDLCK, Whence: io.SeekStart}
	if err := syscall.FcntlFlock(file.Fd(), syscall.F_GETLK, &lock); err != nil {
		return &os.PathError{Op: "fcntl", Path: h.path, Err: err}
	}
	if lock.Type != syscall.F_UNLCK { // a lock against writing: others do not conflict
		return errors.New(h.path + " is that of another leader; give each its own")
	}
	return os.Remove(h.path)
}

// make makes an empty file beside it, which only this user can open.
func (h *healthFile) make() (*os.File, error) {
	path := h.path + ".new"
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
}

// show makes the file appear, whole.
func (h *healthFile) show(lock *pgxlock.Lock) error {
	if h == nil {
		return nil
	}
	if err := h.clear(); err != nil {
		return err
	}
	file, err := h.make()
	if err != nil {
		return err
	}
	var text bytes.Buffer
	err = oneline.JSON(&text, healthReport{lock.Key(), lock.Holder(), lock.Token()}, "")
	if err == nil {
		err = syscall.FcntlFlock(file.Fd(), syscall.F_SETLK, &syscall.Flock_t{Type: syscall.F_WRLCK, Whence: io.SeekStart})
	}
	if err == nil {
		_, err = file.Write(text.Bytes())
	}
	if err == nil {
		err = file.Chmod(0o644)
	}
	if err == nil {
		err = os.Rename(file.Name(), h.path)
	}
	if err != nil {
		return errors.Join(err, file.Close(), os.Remove(file.Name()))
	}
	h.content, h.locked = text.String(), file
	return nil
}

// remove removes the file, if it is still the one that show made.
func (h *healthFile) remove() {
	if h == nil || h.content == "" {
		return
	}
	if h.made() {
		_ = os.Remove(h.path) // if that fails, the next leader says so
	}
	h.content = ""
	if h.locked != nil {
		_ = h.locked.Close()
	}
}

// made reports whether the file is the one that show made: the leader opens it no second time, and
// the watcher has not opened it.
func (h *healthFile) made() bool {
	if h.locked == nil {
		text, err := os.ReadFile(h.path)
		return err == nil && string(text) == h.content
	}
	ours, err := h.locked.Stat()
	there, missing := os.Lstat(h.path)
	return err == nil && missing == nil && os.SameFile(ours, there)
}
