//! Connections between agents and hub. A process gets its network as a value.

use std::net::SocketAddr;
use std::{fmt, io};

use futures::future::BoxFuture;
use hyper_util::client::proxy::matcher::Intercept;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};

use crate::admin::{self, AdminError, BindAddress};

/// Opens and accepts connections.
pub trait Network: fmt::Debug + Send + Sync {
    fn connect(&self, address: SocketAddr) -> BoxFuture<'_, io::Result<Stream>>;

    /// Returns the HTTP proxy for connections to `address` (`HOST:PORT`), if there is one.
    fn proxy(&self, _address: &str) -> Option<Intercept> {
        None
    }

    /// Listens on `address`, by default in the machine's network. Errors name `flag`.
    fn listen<'a>(
        &'a self,
        flag: &'static str,
        address: &'a BindAddress,
    ) -> BoxFuture<'a, Result<Listener, AdminError>> {
        Box::pin(async move { Ok(Box::new(admin::bind(flag, address).await?) as Listener) })
    }
}

/// The network of the machine. Its connections send small writes immediately.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tcp;

impl Network for Tcp {
    fn connect(&self, address: SocketAddr) -> BoxFuture<'_, io::Result<Stream>> {
        Box::pin(async move {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            Ok(Box::new(stream) as Stream)
        })
    }
}

/// A connection.
pub type Stream = Box<dyn Duplex>;

/// A byte stream in both directions.
pub trait Duplex: AsyncRead + AsyncWrite + fmt::Debug + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + fmt::Debug + Send + Unpin> Duplex for T {}

/// A source of connections.
pub type Listener = Box<dyn Accept>;

/// Accepts connections.
pub trait Accept: fmt::Debug + Send + Sync {
    /// Returns the next connection and its peer, as an IPv4 address if it is one. Cancel-safe.
    fn accept(&self) -> BoxFuture<'_, io::Result<(Stream, SocketAddr)>>;

    /// Returns the address on which it listens.
    fn local_addr(&self) -> io::Result<SocketAddr>;
}

impl Accept for TcpListener {
    fn accept(&self) -> BoxFuture<'_, io::Result<(Stream, SocketAddr)>> {
        Box::pin(async move {
            let (stream, peer) = Self::accept(self).await?;
            // An error on a closed connection shows up at the next read.
            drop(stream.set_nodelay(true));
            // A listener for both families returns IPv4 addresses in the form ::ffff:10.0.0.1.
            let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
            Ok((Box::new(stream) as Stream, peer))
        })
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Self::local_addr(self)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn dialed_stream_carries_bytes_to_accepted_one() {
        let loopback = "127.0.0.1:0".parse().unwrap();
        let listener = Tcp.listen("--listen", &loopback).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (dialed, accepted) = tokio::join!(Tcp.connect(address), listener.accept());
        let (mut from, (mut to, _)) = (dialed.unwrap(), accepted.unwrap());
        from.write_all(b"hello").await.unwrap();
        from.shutdown().await.unwrap();
        let mut text = String::new();
        to.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "hello");
    }
}
