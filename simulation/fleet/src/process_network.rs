//! The network of one process: it connects and listens.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use futures::future::BoxFuture;
use krypton_runtime::admin::{AdminError, BindAddress};
use krypton_runtime::net::{Accept, Listener, Network, Stream};
use tokio::sync::{mpsc, oneshot};

use crate::outbox::stream::SimStream;
use crate::outbox::{Message, Outbox, ProcessId};

/// The network of one process.
#[derive(Clone, Debug)]
pub struct SimNetwork {
    pub process: ProcessId,
    pub outbox: Outbox,
}

impl Network for SimNetwork {
    fn connect(&self, address: SocketAddr) -> BoxFuture<'_, io::Result<Stream>> {
        Box::pin(async move {
            let (reply, response) = oneshot::channel();
            let message = Message::Dial { address, reply };
            self.outbox.push(self.process, message);
            let stream = response
                .await
                .map_err(|_| io::Error::from(io::ErrorKind::ConnectionReset))??;
            Ok(Box::new(stream) as Stream)
        })
    }

    fn listen<'a>(
        &'a self,
        flag: &'static str,
        address: &'a BindAddress,
    ) -> BoxFuture<'a, Result<Listener, AdminError>> {
        Box::pin(async move {
            let host = address.host.as_deref().and_then(|host| host.parse().ok());
            let Some(host) = host else {
                return Err(AdminError::Bind {
                    flag,
                    address: address.clone(),
                    source: io::Error::other("a simulated process listens on an IP address"),
                });
            };
            let address = SocketAddr::new(host, address.port);
            Ok(self.listener(address))
        })
    }

    fn listen_on_loopback(&self) -> BoxFuture<'_, io::Result<Listener>> {
        Box::pin(async { Ok(Box::new(UnusedListener) as Listener) })
    }
}

impl SimNetwork {
    fn listener(&self, address: SocketAddr) -> Listener {
        #[allow(
            clippy::disallowed_methods,
            reason = "the number of agents bounds the connections"
        )]
        let (connections, arrivals) = mpsc::unbounded_channel();
        let message = Message::Listen {
            address,
            connections,
        };
        self.outbox.push(self.process, message);
        Box::new(SimListener {
            address,
            arrivals: tokio::sync::Mutex::new(arrivals),
            network: self.clone(),
        })
    }
}

/// Nothing connects to it: the model of Helm reaches API servers directly.
#[derive(Debug)]
struct UnusedListener;

impl Accept for UnusedListener {
    fn accept(&self) -> BoxFuture<'_, io::Result<(Stream, SocketAddr)>> {
        Box::pin(std::future::pending())
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok((Ipv4Addr::LOCALHOST, 1).into())
    }
}

#[derive(Debug)]
struct SimListener {
    address: SocketAddr,
    arrivals: tokio::sync::Mutex<mpsc::UnboundedReceiver<(SimStream, SocketAddr)>>,
    network: SimNetwork,
}

impl Accept for SimListener {
    fn accept(&self) -> BoxFuture<'_, io::Result<(Stream, SocketAddr)>> {
        Box::pin(async {
            let connection = self.arrivals.lock().await.recv().await;
            let (stream, peer) = connection.ok_or(io::ErrorKind::ConnectionAborted)?;
            Ok((Box::new(stream) as Stream, peer))
        })
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

impl Drop for SimListener {
    fn drop(&mut self) {
        let message = Message::Unlisten {
            address: self.address,
        };
        self.network.outbox.push(self.network.process, message);
    }
}
