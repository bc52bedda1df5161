package serve

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// knows reports whether a request may name this host. A page elsewhere can make its own name
// lead to this server, and would then be taken for ours; it cannot do that to an address.
func (s *Server) knows(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = host
	}
	name = strings.ToLower(strings.TrimSuffix(strings.Trim(name, "[]"), "."))
	if address, err := netip.ParseAddr(name); err == nil {
		return s.cfg.Remote || address.IsLoopback()
	}
	return name == "localhost" || slices.ContainsFunc(s.cfg.Hosts, func(allowed string) bool { return strings.EqualFold(allowed, name) })
}

const cookieLife = 12 * time.Hour

// secure reports whether the browser reaches the page by TLS.
func secure(r *http.Request) bool {
	return r.TLS != nil || r.Header.Get("X-Forwarded-Proto") == "https"
}

// cookieName has the port in it: browsers send cookies to all ports of a host, and tunnels to
// several servers end at localhost. With TLS it is one that only this host can set, and by TLS.
func cookieName(r *http.Request) string {
	name := "pgxlock_serve"
	if secure(r) {
		name = "__Host-" + name
	}
	if _, port, err := net.SplitHostPort(r.Host); err == nil {
		if _, err := strconv.ParseUint(port, 10, 16); err == nil {
			name += "_" + port
		}
	}
	return name
}

// right reports whether a token is the one of this server, in a time that says nothing of it.
func (s *Server) right(token string) bool {
	got, want := sha256.Sum256([]byte(token)), sha256.Sum256([]byte(s.cfg.Token))
	return subtle.ConstantTimeCompare(got[:], want[:]) == 1
}

// sign returns what only this process can make of a text.
func (s *Server) sign(purpose, text string) string {
	mac := hmac.New(sha256.New, s.secret)
	mac.Write([]byte(purpose + "\x00" + text))
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// newSession returns the value of a cookie: until when it is good, something of its own, and
// our signature.
func (s *Server) newSession() string {
	text := strconv.FormatInt(time.Now().Add(cookieLife).Unix(), 10) + "." + rand.Text()
	return text + "." + s.sign("session", text)
}

// session returns the session of a request; "" if it has none that is good.
func (s *Server) session(r *http.Request) string {
	cookie, err := r.Cookie(cookieName(r))
	if err != nil {
		return ""
	}
	at := strings.LastIndexByte(cookie.Value, '.')
	if at < 0 {
		return ""
	}
	text, signed := cookie.Value[:at], cookie.Value[at+1:]
	until, _, _ := strings.Cut(text, ".")
	if !hmac.Equal([]byte(signed), []byte(s.sign("session", text))) {
		return ""
	}
	if end, err := strconv.ParseInt(until, 10, 64); err != nil || time.Now().Unix() >= end {
		return ""
	}
	if _, left := s.left.Load(text); left {
		return ""
	}
	return text
}

// bearer returns the token that a program sends; "" if there is none.
func bearer(r *http.Request) string {
	token, program := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !program {
		return ""
	}
	return token
}

// allows reports whether a request has what the server asks for: of browsers a session, of
// programs a bearer token.
func (s *Server) allows(r *http.Request) bool {
	return s.cfg.Token == "" || s.session(r) != "" || s.right(bearer(r))
}

// authorized asks for the token, if there is one.
func (s *Server) authorized(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case s.allows(r):
			next.ServeHTTP(w, r)
		case r.URL.Path == "/" && r.Method != http.MethodPost && r.Header.Get("Authorization") == "":
			http.Redirect(w, r, "/login", http.StatusSeeOther)
		default:
			code := http.StatusUnauthorized
			if bearer(r) != "" {
				code = s.guesses.refuse(r)
			}
			w.Header().Set("WWW-Authenticate", "Bearer")
			answer(w, code, "the token is missing or wrong")
		}
	})
}

// login shows the form for the token.
func (s *Server) login(w http.ResponseWriter, r *http.Request) {
	if s.cfg.Token == "" || s.session(r) != "" {
		http.Redirect(w, r, "/", http.StatusSeeOther)
		return
	}
	render(w, http.StatusOK, "login.html", "")
}

// enter makes a session of the right token.
func (s *Server) enter(w http.ResponseWriter, r *http.Request) {
	r.Body = http.MaxBytesReader(w, r.Body, mostForm)
	if s.cfg.Token == "" || !s.right(r.PostFormValue("token")) {
		render(w, s.guesses.refuse(r), "login.html", "That is not the token of this server.")
		return
	}
	http.SetCookie(w, s.cookie(r, s.newSession(), int(cookieLife.Seconds())))
	http.Redirect(w, r, "/", http.StatusSeeOther)
}

// leave ends the session, in all tabs of the browser.
func (s *Server) leave(w http.ResponseWriter, r *http.Request) {
	if session := s.session(r); session != "" {
		s.left.Store(session, nil)
	}
	http.SetCookie(w, s.cookie(r, "", -1))
	http.Redirect(w, r, "/login", http.StatusSeeOther)
}

func (s *Server) cookie(r *http.Request, value string, age int) *http.Cookie {
	return &http.Cookie{
		Name: cookieName(r), Value: value, Path: "/", MaxAge: age, HttpOnly: true, SameSite: http.SameSiteStrictMode,
		Secure: secure(r),
	}
}
