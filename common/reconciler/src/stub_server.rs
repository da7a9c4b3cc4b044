//! An API server for tests, whose responses each test defines.

use std::convert::Infallible;
use std::sync::Arc;

use http::{Method, Request, Response, StatusCode};
use kube::Client;
use kube::client::Body;
use parking_lot::Mutex;
use serde_json::{Value, json};

/// A received request.
#[derive(Clone, Debug)]
pub(crate) struct ReceivedRequest {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) body: Value,
    /// Number of earlier requests with this method.
    pub(crate) earlier: usize,
}

impl ReceivedRequest {
    /// Returns the last segment of the path.
    pub(crate) fn last_segment(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    /// Returns the method and the last segment of the path.
    pub(crate) fn line(&self) -> String {
        format!("{} {}", self.method, self.last_segment())
    }
}

/// A server with a log of its requests.
#[derive(Clone)]
pub(crate) struct StubServer {
    pub(crate) client: Client,
    requests: Arc<Mutex<Vec<ReceivedRequest>>>,
}

impl StubServer {
    /// Starts a server that responds with a code and a body. The body of a failure is its message.
    pub(crate) fn start(
        respond: impl Fn(&ReceivedRequest) -> (u16, Value) + Send + Sync + 'static,
    ) -> Self {
        let respond = Arc::new(respond);
        let requests: Arc<Mutex<Vec<ReceivedRequest>>> = Arc::default();
        let log = Arc::clone(&requests);
        let service = tower::service_fn(move |request: Request<Body>| {
            let (respond, log) = (Arc::clone(&respond), Arc::clone(&log));
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap_or_default();
                let mut request = ReceivedRequest {
                    method: parts.method,
                    path: parts.uri.path().to_owned(),
                    query: parts.uri.query().unwrap_or_default().to_owned(),
                    body: serde_json::from_slice(&body).unwrap_or_default(),
                    earlier: 0,
                };
                let (code, body) = {
                    let mut log = log.lock();
                    let previous = log.iter().filter(|other| other.method == request.method);
                    request.earlier = previous.count();
                    log.push(request.clone());
                    respond(&request)
                };
                let reason = match code {
                    403 => "Forbidden",
                    404 => "NotFound",
                    _ => "Test",
                };
                let body = match code {
                    200 | 201 => body,
                    _ => json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
                        "code": code, "message": body, "reason": reason}),
                };
                let mut response = Response::new(Body::from(body.to_string().into_bytes()));
                *response.status_mut() = StatusCode::from_u16(code).unwrap();
                Ok::<_, Infallible>(response)
            }
        });
        Self {
            client: Client::new(service, "default"),
            requests,
        }
    }

    pub(crate) fn requests(&self) -> Vec<ReceivedRequest> {
        self.requests.lock().clone()
    }
}
