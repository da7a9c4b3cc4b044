//! Server for `/debug/`: the log filter and other information about the process, for users with access to its
//! pod. It has no authentication, so it listens only on loopback.

use std::time::Duration;

use krypton_types::error_chain::chain;
use krypton_types::loopback;

use crate::telemetry::LogLevel;
use axum::Router;
use axum::extract::{RawQuery, Request};
use axum::http::uri::Authority;
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::{AdminError, BindAddress, BoundedListener, ConnectionLimits, bind, serve};
use crate::args::go_values::parse_duration;
use crate::clock;

/// The flag of the debug server, for messages.
pub const DEBUG_FLAG: &str = "--debug-bind-address";
/// Default address.
pub const DEFAULT_DEBUG_ADDRESS: &str = "127.0.0.1:8082";

/// Default duration of a filter. The limit prevents a forgotten filter from filling the disk.
const DEFAULT_FILTER_DURATION: Duration = Duration::from_secs(15 * 60);
const FILTER_DURATION_MAX: Duration = Duration::from_secs(24 * 3600);

/// Listens on `address`. If that fails, logs an error and lets the process run without this server: a
/// diagnostic tool must not cause an outage.
pub async fn bind_debug(address: &BindAddress) -> Option<TcpListener> {
    let listener = match bind(DEBUG_FLAG, address).await {
        Ok(listener) => listener,
        Err(error) => {
            tracing::warn!(error = %chain(&error), "failed to serve /debug");
            return None;
        }
    };
    // A host name may resolve to any address.
    match listener.local_addr() {
        Ok(at) if at.ip().is_loopback() => {
            tracing::info!(address = %at, "serving /debug");
            Some(listener)
        }
        _ => {
            tracing::warn!(%address, flag = DEBUG_FLAG, "not serving /debug on a non-loopback address");
            None
        }
    }
}

/// Serves `/debug/log` and `other_routes` until `stop`.
///
/// # Errors
/// Returns an error if the server fails.
pub async fn serve_debug(
    listener: TcpListener,
    level: LogLevel,
    other_routes: Router,
    stop: CancellationToken,
) -> Result<(), AdminError> {
    let level_reader = level.clone();
    let get_filter = move || async move { format!("{}\n", level_reader.current()) };
    let until_stop = stop.clone();
    let put_filter = move |RawQuery(query): RawQuery, filter: String| async move {
        match change_filter(&level, query.as_deref(), &filter, &until_stop) {
            Ok(()) => (StatusCode::OK, format!("{}\n", level.current())),
            Err(problem) => (StatusCode::BAD_REQUEST, format!("{problem}\n")),
        }
    };
    let router = with_host_check(other_routes.route("/debug/log", get(get_filter).put(put_filter)));
    let listener = BoundedListener::new(listener, ConnectionLimits::READERS);
    serve(DEBUG_FLAG, listener, router, stop).await
}

fn with_host_check(router: Router) -> Router {
    router.layer(from_fn(require_loopback_host))
}

/// Rejects DNS rebinding: a web page in the browser of a user with a forwarded port may resolve its own name
/// to this server.
async fn require_loopback_host(request: Request, next: Next) -> Response {
    let host_headers = request.headers().get_all(header::HOST);
    let in_headers = host_headers
        .iter()
        .map(|host| host.to_str().unwrap_or_default());
    let in_target = request.uri().authority();
    let mut hosts_and_authority = in_headers.chain(in_target.map(Authority::as_str));
    let is_local = host_headers.iter().count() == 1 && hosts_and_authority.all(is_loopback_host);
    match is_local {
        true => next.run(request).await,
        false => {
            let problem = "use the host name localhost or a loopback address\n";
            (StatusCode::FORBIDDEN, problem).into_response()
        }
    }
}

/// Returns whether a `Host` header names this machine.
fn is_loopback_host(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|digit| digit.is_ascii_digit()) => name,
        _ => host,
    };
    loopback::is_loopback(name)
}

/// Sets the filter, and restores the previous one when its duration ends.
fn change_filter(
    level: &LogLevel,
    query: Option<&str>,
    filter: &str,
    stop: &CancellationToken,
) -> Result<(), String> {
    let duration = duration_from_query(query)?;
    let until = duration.and_then(|duration| clock::wall().checked_add(duration).ok());
    let previous = level.current();
    let change = level
        .set(filter, until, |now| {
            tracing::warn!(before = %previous, %now, "changing the log filter by PUT /debug/log");
        })
        .map_err(|error| error.to_string())?;
    // Log again, in case the previous filter suppressed the message.
    tracing::warn!(before = %previous, now = %level.current(), "changed the log filter by PUT /debug/log");
    if let Some(duration) = duration {
        let (level, stop) = (level.clone(), stop.clone());
        tokio::spawn(async move {
            let elapsed = stop.run_until_cancelled(tokio::time::sleep(duration)).await;
            if elapsed.is_some() && level.end(change) {
                tracing::warn!(now = %level.current(), "restored the log filter of the start");
            }
        });
    }
    Ok(())
}

/// Returns the duration of a filter. `None` lasts until the restart.
fn duration_from_query(query: Option<&str>) -> Result<Option<Duration>, String> {
    let mut duration = Some(DEFAULT_FILTER_DURATION);
    for part in query
        .unwrap_or_default()
        .split('&')
        .filter(|part| !part.is_empty())
    {
        let Some(text) = part.strip_prefix("for=") else {
            return Err(format!(
                "unknown parameter {part}; only for=DURATION is supported"
            ));
        };
        duration = parse_filter_duration(text)?;
    }
    Ok(duration)
}

/// A response of the debug port: one line of JSON.
pub fn json(content: &impl Serialize) -> Response {
    let json = [(header::CONTENT_TYPE, "application/json")];
    match serde_json::to_string(content) {
        Ok(text) => (json, text + "\n").into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Parses the duration of a filter. `None` lasts until the restart.
///
/// # Errors
/// Returns a sentence about the error in `text`.
pub fn parse_filter_duration(text: &str) -> Result<Option<Duration>, String> {
    match parse_duration(text) {
        Some(Duration::ZERO) => Ok(None),
        Some(duration) if duration <= FILTER_DURATION_MAX => Ok(Some(duration)),
        _ => Err(format!(
            "for={text} is not a valid duration; write 90s, 15m or 2h, at most 24h, or 0 until the restart"
        )),
    }
}

/// Returns whether only processes on this machine can reach the address.
pub fn is_loopback(address: &BindAddress) -> bool {
    let host = address.host.as_deref();
    host.is_some_and(loopback::is_loopback)
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use tower::ServiceExt as _;

    use super::*;

    #[test]
    fn only_loopback_will_do() {
        let is_loopback_text = |text: &str| is_loopback(&text.parse().unwrap());
        for text in ["127.0.0.1:8082", "[::1]:0", "localhost:1", "127.1.2.3:1"] {
            assert!(is_loopback_text(text), "{text}");
        }
        for text in [":8082", "0.0.0.0:8082", "[::]:1", "10.0.0.1:1", "hub:1"] {
            assert!(!is_loopback_text(text), "{text}");
        }
    }

    #[test]
    fn only_loopback_host_headers_are_accepted() {
        for host in [
            "localhost:8082",
            "LOCALHOST",
            "127.0.0.1:80",
            "127.0.0.2",
            "[::1]:8082",
        ] {
            assert!(is_loopback_host(host), "{host}");
        }
        for host in [
            "evil.example.org:8082",
            "localhost.example.org",
            "10.0.0.1:8082",
            "",
            ":1",
        ] {
            assert!(!is_loopback_host(host), "{host}");
        }
    }

    #[test]
    fn filter_duration_has_default_and_one_day_maximum() {
        let minutes = |minutes: u64| Ok(Some(Duration::from_secs(60 * minutes)));
        assert_eq!(duration_from_query(None), minutes(15));
        assert_eq!(duration_from_query(Some("")), minutes(15));
        assert_eq!(duration_from_query(Some("for=2h")), minutes(120));
        assert_eq!(duration_from_query(Some("for=24h")), minutes(24 * 60));
        assert_eq!(duration_from_query(Some("for=0")), Ok(None));
        for query in ["for=24h1s", "for=", "for=-1m", "for=5", "until=5m"] {
            assert!(duration_from_query(Some(query)).is_err(), "{query}");
        }
    }
    #[tokio::test]
    async fn requests_of_foreign_hosts_are_refused() {
        let router = with_host_check(Router::new().route("/debug/log", get(|| async {})));
        let here = "http://localhost:1/debug/log";
        let elsewhere = "http://example.org/debug/log";
        for (target, hosts, expected) in [
            ("/debug/log", vec!["localhost"], StatusCode::OK),
            (here, vec!["localhost"], StatusCode::OK),
            ("/debug/log", vec!["example.org"], StatusCode::FORBIDDEN),
            ("/debug/log", vec![], StatusCode::FORBIDDEN),
            (
                "/debug/log",
                vec!["localhost", "example.org"],
                StatusCode::FORBIDDEN,
            ),
            (
                "/debug/log",
                vec!["localhost", "localhost"],
                StatusCode::FORBIDDEN,
            ),
            (elsewhere, vec!["localhost"], StatusCode::FORBIDDEN),
        ] {
            let mut request = Request::builder().uri(target);
            for host in &hosts {
                request = request.header(header::HOST, *host);
            }
            let request = request.body(Body::empty()).unwrap();
            let response = router.clone().oneshot(request).await.unwrap();
            assert_eq!(response.status(), expected, "{target} {hosts:?}");
        }
    }
}
