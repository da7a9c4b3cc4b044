//! A proxy that counts the writes of one Helm run and holds the nth.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use super::{Outcome, error_text};

const MAX_BODY_BYTES: usize = 16 << 20;

#[derive(Clone)]
struct GateState {
    client: Client,
    hold_at: Option<usize>,
    writes: Arc<AtomicUsize>,
    reached: Arc<Semaphore>,
}

pub(super) struct Gate {
    url: String,
    reached: Arc<Semaphore>,
    serving: JoinHandle<()>,
}

impl Gate {
    /// Starts the proxy. It holds the write with number `hold_at`, counted from 1.
    pub(super) async fn start(client: Client, hold_at: Option<usize>) -> Outcome<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.map_err(error_text)?;
        let address = listener.local_addr().map_err(error_text)?;
        let reached = Arc::new(Semaphore::new(0));
        let state = GateState {
            client,
            hold_at,
            writes: Arc::default(),
            reached: reached.clone(),
        };
        let router = Router::new().fallback(forward).with_state(state);
        let serving = tokio::spawn(async move {
            let served = axum::serve(listener, router).await;
            served.unwrap_or_default();
        });
        Ok(Self {
            url: format!("http://{address}"),
            reached,
            serving,
        })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Waits until the held write has arrived.
    pub(super) async fn reached(&mut self) {
        let permit = self.reached.acquire().await;
        permit
            .map(tokio::sync::SemaphorePermit::forget)
            .unwrap_or_default();
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn forward(State(state): State<GateState>, request: Request) -> Response {
    let is_read = [Method::GET, Method::HEAD].contains(request.method());
    if !is_read {
        let number = state.writes.fetch_add(1, Ordering::SeqCst) + 1;
        if state.hold_at == Some(number) {
            state.reached.add_permits(1);
            std::future::pending::<()>().await;
        }
    }
    let (mut head, body) = request.into_parts();
    let Ok(body) = to_bytes(body, MAX_BODY_BYTES).await else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    for name in [header::HOST, header::ACCEPT_ENCODING, header::CONNECTION] {
        head.headers.remove(name);
    }
    let body = kube::client::Body::from(body.to_vec());
    match state.client.send(Request::from_parts(head, body)).await {
        Ok(response) => response.map(Body::new),
        Err(error) => (StatusCode::BAD_GATEWAY, error_text(error)).into_response(),
    }
}
