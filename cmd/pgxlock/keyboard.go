//go:build linux || darwin || dragonfly || freebsd || netbsd || openbsd

package main

import (
	"context"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A keyboard passes single keys from the terminal on while we are in its foreground. The terminal
// shows none of them and collects no lines, but Ctrl-C, Ctrl-Z and Ctrl-\ stay signals, and
// output is as before. Whenever we end or stop the terminal is as it was.
type keyboard struct {
	fd int

	mu     sync.Mutex
	before *unix.Termios // what the terminal was set to; nil: it is
	closed bool          // it must stay as it is
}

// keyPoll is how often a keyboard checks whether we are in the foreground: a shell need not
// say so.
const keyPoll = 200 * time.Millisecond

// openKeyboard returns nil where there is none: in is no terminal, or not that of our session.
func openKeyboard(in io.Reader) *keyboard {
	file, ok := in.(*os.File)
	if !ok || !isOurTerminal(int(file.Fd())) {
		return nil
	}
	return &keyboard{fd: int(file.Fd())}
}

// foreground reports whether the terminal is ours to set: to set it in the background would stop
// us.
func (k *keyboard) foreground() bool {
	group, err := unix.IoctlGetInt(k.fd, unix.TIOCGPGRP)
	return err == nil && group == syscall.Getpgrp()
}

// enter sets the terminal to single keys, and reports whether it is.
func (k *keyboard) enter() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed || !k.foreground() {
		return false
	}
	if k.before != nil {
		return true
	}
	before, err := unix.IoctlGetTermios(k.fd, getTermios)
	if err != nil {
		return false
	}
	single := *before
	single.Lflag &^= unix.ICANON | unix.ECHO
	single.Cc[unix.VMIN], single.Cc[unix.VTIME] = 1, 0
	if unix.IoctlSetTermios(k.fd, setTermios, &single) != nil {
		return false
	}
	k.before = before
	return true
}

// leave sets the terminal as it was, and closes the keyboard until reopened.
func (k *keyboard) leave() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.before != nil && k.foreground() {
		_ = unix.IoctlSetTermios(k.fd, setTermios, k.before) // it may have hung up
	}
	k.before, k.closed = nil, true
}

func (k *keyboard) reopen() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.closed = false
}

// serve calls press with what is typed, and again when the screen is to be drawn again, until ctx
// ends or the function that it returns is called. After either the terminal is as it was.
func (k *keyboard) serve(ctx context.Context, press func([]byte), again func()) (closed func()) {
	if k == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	context.AfterFunc(ctx, k.leave) // at once: a second signal would end us at any moment
	signals := make(chan os.Signal, 8)
	hear(signals, syscall.SIGTSTP, syscall.SIGCONT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGWINCH)
	var running sync.WaitGroup
	running.Go(func() {
		defer k.leave() // also in a panic
		for {
			select {
			case <-ctx.Done():
				signal.Stop(signals)
				return
			case sig := <-signals:
				k.obey(sig.(syscall.Signal), again)
			}
		}
	})
	running.Go(func() {
		defer k.leave()
		k.read(ctx, press)
	})
	return func() {
		cancel()
		running.Wait()
		k.leave()
	}
}

// obey does what a signal would do without us, with the terminal as it was.
func (k *keyboard) obey(sig syscall.Signal, again func()) {
	switch sig {
	case syscall.SIGTSTP:
		if orphaned() {
			return // no shell would let us go on
		}
		k.leave()
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP) // until SIGCONT
	case syscall.SIGCONT:
		k.reopen()
		again()
	case syscall.SIGWINCH:
		again()
	default:
		k.leave()
		signal.Reset(sig)
		_ = syscall.Kill(os.Getpid(), sig)
	}
}

func (k *keyboard) read(ctx context.Context, press func([]byte)) {
	typed := make([]byte, 64)
	for ctx.Err() == nil {
		if !k.enter() {
			_, _ = unix.Poll(nil, int(keyPoll.Milliseconds())) // a pause
			continue
		}
		fds := []unix.PollFd{{Fd: int32(k.fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, int(keyPoll.Milliseconds()))
		switch {
		case err != nil && err != unix.EINTR, n > 0 && fds[0].Revents&unix.POLLIN == 0:
			return // it has hung up
		case n <= 0 || !k.enter():
			continue
		}
		n, err = unix.Read(k.fd, typed)
		if err != nil && err != unix.EINTR || err == nil && n == 0 {
			return
		}
		if n > 0 {
			press(typed[:n])
		}
	}
}
