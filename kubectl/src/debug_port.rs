//! Queries the debug port of a hub or agent: one request over a stream that the API server forwards into the pod. Opens
//! no local port.

use std::net::SocketAddr;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, StatusCode, header};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use krypton_runtime::admin::{BindAddress, DEBUG_FLAG, DEFAULT_DEBUG_ADDRESS};
use krypton_types::error_chain::chain;
use kube::api::Portforwarder;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_util::task::AbortOnDropHandle;

use crate::error::KubectlError;
use crate::home::Connection;
use crate::program::{Program, setting};
use crate::render::one_line;

/// Time from opening the stream to the end of the response.
const DEADLINE: Duration = Duration::from_secs(15);
/// Maximum size of a response in bytes. The dump of 1,000 members takes 2 MiB.
const MAX_RESPONSE_BYTES: usize = 8 << 20;
/// Maximum number of characters shown of a line. A log filter has at most 4 KiB.
const MAX_SHOWN_CHARS: usize = 8 << 10;
/// Environment variable that can replace the flag.
const ADDRESS_VARIABLE: &str = "KRYPTON_DEBUG_BIND_ADDRESS";

/// Location of the debug port.
#[derive(Clone, Copy)]
pub(super) enum DebugPort<'a> {
    Pod {
        cluster: &'a Connection,
        namespace: &'a str,
        name: &'a str,
        /// Port that [`port_of`] returned.
        port: Option<u16>,
    },
    /// Direct connection without a pod, for tests.
    Address(SocketAddr),
}

impl DebugPort<'_> {
    /// Gets a path, or puts a filter to it. Returns the response body.
    ///
    /// # Errors
    /// Also fails if the program rejects the request, which then has changed nothing.
    pub(super) async fn send(
        &self,
        path: &str,
        filter: Option<&str>,
    ) -> Result<String, KubectlError> {
        let exchange = tokio::time::timeout(DEADLINE, self.connect_and_send(path, filter));
        let (status, body) = exchange.await.unwrap_or_else(|_| {
            let seconds = DEADLINE.as_secs();
            let hint = filter.map_or("", |_| "; check whether the filter has changed");
            Err(self.no_response(&format!("no response within {seconds} s{hint}")))
        })?;
        match status {
            StatusCode::OK => Ok(body),
            StatusCode::NOT_FOUND => Err(self.refused(&format!(
                "has no {path}: its version differs from the version of this program"
            ))),
            StatusCode::BAD_REQUEST => {
                Err(self.refused(&format!("rejected the request: {}", shortened(&body))))
            }
            status => Err(self.no_response(&format!("{status}: {}", shortened(&body)))),
        }
    }

    async fn connect_and_send(
        &self,
        path: &str,
        filter: Option<&str>,
    ) -> Result<(StatusCode, String), KubectlError> {
        match self {
            Self::Address(address) => match TcpStream::connect(address).await {
                Ok(stream) => self.exchange(stream, path, filter).await,
                Err(error) => Err(self.no_response(&error.to_string())),
            },
            Self::Pod { port: None, .. } => Err(self.refused(&format!(
                "is switched off: set {DEBUG_FLAG} to a loopback address and restart the process"
            ))),
            Self::Pod {
                cluster,
                namespace,
                name,
                port: Some(port),
            } => {
                let mut forwarder = self.forward(cluster, namespace, name, *port).await?;
                let stream = forwarder.take_stream(*port);
                let pod_error = forwarder.take_error(*port);
                let (Some(stream), Some(pod_error)) = (stream, pod_error) else {
                    return Err(self.no_response("no stream was opened"));
                };
                let pod_error = async {
                    match pod_error.await {
                        Some(reason) => reason,
                        // The stream ended without an error; reading it returns the reason.
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    // Prefer the pod's error, which arrives before the stream ends.
                    biased;
                    reason = pod_error => Err(match reason.contains("refused") {
                        true => self.refused(&format!(
                            "is not served at {port}: its log shows why ({})",
                            shortened(&reason)
                        )),
                        false => self.no_response(&shortened(&reason)),
                    }),
                    response = self.exchange(stream, path, filter) => response,
                }
            }
        }
    }

    async fn forward(
        &self,
        cluster: &Connection,
        namespace: &str,
        name: &str,
        port: u16,
    ) -> Result<Portforwarder, KubectlError> {
        let pods = cluster.namespaced::<Pod>(namespace);
        let forwards = cluster
            .namespaced::<Pod>(namespace)
            .subresource("portforward");
        // A WebSocket upgrade is a GET request; newer API servers also require the verb create.
        let ports = [port];
        let opening = pods.api.portforward(name, &ports);
        let forwarder = forwards.call("get and create", "", opening).await;
        forwarder.map_err(|error| match (error.code(), error) {
            (Some(404), _) => pods.not_found("pod", name),
            (Some(500..), KubectlError::Call(call)) => self.no_response(&shortened(&call.reason())),
            (_, error) => error,
        })
    }

    /// Sends one HTTP request and reads the response.
    async fn exchange(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        path: &str,
        filter: Option<&str>,
    ) -> Result<(StatusCode, String), KubectlError> {
        let failed = |error: &dyn std::error::Error| self.no_response(&one_line(&chain(error)));
        let request = Request::builder()
            .method(filter.map_or(Method::GET, |_| Method::PUT))
            .uri(path)
            // The debug port rejects other host names.
            .header(header::HOST, "localhost")
            .body(Body::from(filter.unwrap_or_default().to_owned()))
            .map_err(|error| failed(&error))?;
        let connected = http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = connected.map_err(|error| failed(&error))?;
        let _connection_task = AbortOnDropHandle::new(tokio::spawn(connection));
        let response = sender.send_request(request).await;
        let (head, body) = response.map_err(|error| failed(&error))?.into_parts();
        let bytes = to_bytes(Body::new(body), MAX_RESPONSE_BYTES).await;
        let bytes = bytes.map_err(|error| failed(&error))?;
        Ok((head.status, String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// Name of the pod, or the address, for messages.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Pod { name, .. } => (*name).to_owned(),
            Self::Address(address) => address.to_string(),
        }
    }

    pub(super) fn no_response(&self, reason: &str) -> KubectlError {
        KubectlError::NoResponse(format!(
            "the debug port of {} does not respond: {reason}",
            self.name()
        ))
    }

    fn refused(&self, reason: &str) -> KubectlError {
        KubectlError::Refused(format!("the debug port of {} {reason}", self.name()))
    }
}

/// Shortens a response to one line, because any user with the right to create pods can forge one.
pub(super) fn shortened(response: &str) -> String {
    let short: String = response.chars().take(MAX_SHOWN_CHARS).collect();
    one_line(&short)
}

/// Returns the port of `/debug` from the pod's spec, or `None` if it is disabled.
pub(super) fn port_of(pod: &Value, program: Program) -> Option<u16> {
    let address = setting(pod, program, (DEBUG_FLAG, ADDRESS_VARIABLE));
    match address.unwrap_or(DEFAULT_DEBUG_ADDRESS) {
        "0" => None,
        text => {
            // A pod with an invalid address does not start and reports the error itself.
            let address = text
                .parse()
                .ok()
                .or_else(|| DEFAULT_DEBUG_ADDRESS.parse().ok());
            address.map(|address: BindAddress| address.port)
        }
    }
}

/// Parses a loopback address with a port. A user with access to it needs no other permission.
pub(super) fn parse_loopback_address(text: &str) -> Result<SocketAddr, String> {
    match text.parse::<SocketAddr>() {
        Ok(address) if address.ip().is_loopback() => Ok(address),
        _ => Err("not a loopback address with a port".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn debug_port_comes_from_flag_variable_or_default() {
        let flag = |value: &str| json!([format!("{DEBUG_FLAG}={value}")]);
        let variable = |value: &str| json!([{"name": ADDRESS_VARIABLE, "value": value}]);
        for (args, env, port) in [
            (json!([]), json!([]), Some(8082)),
            (flag("127.0.0.1:9"), json!([]), Some(9)),
            (json!([DEBUG_FLAG, "[::1]:10"]), json!([]), Some(10)),
            (json!([]), variable("localhost:11"), Some(11)),
            (flag("127.0.0.1:9"), variable("0"), Some(9)),
            (flag("0"), json!([]), None),
            (json!([]), variable("0"), None),
            (flag("what"), json!([]), Some(8082)),
            (
                json!([format!("{DEBUG_FLAG}-more=1:1")]),
                json!([]),
                Some(8082),
            ),
        ] {
            let pod = json!({"spec": {"containers": [
                {"name": "beside", "args": ["--debug-bind-address=0"]},
                {"name": "krypton-hub", "args": args, "env": env},
            ]}});
            assert_eq!(port_of(&pod, Program::Hub), port, "{pod}");
        }
    }

    #[test]
    fn only_loopback_is_used_without_pod() {
        assert!(parse_loopback_address("127.0.0.1:1").is_ok());
        assert!(parse_loopback_address("[::1]:1").is_ok());
        for text in ["10.0.0.1:1", "127.0.0.1", "localhost:1", "hub:1"] {
            assert!(parse_loopback_address(text).is_err(), "{text}");
        }
    }
}
